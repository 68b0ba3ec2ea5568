"""READ grants: what a consumer pulls with."""

from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.leases import Lease
from kvgrpc.core.values.grants import AccessKind, Claims, mint


def read_grant(state: NodeState, lease: Lease, key: bytes) -> bytes:
    """Returns a READ grant on a lease, with that transfer key."""
    engine = state.life.engine
    claims = Claims(
        AccessKind.READ, engine.engine_id, state.life.incarnation, engine.address, lease.id, key, lease.ttl_s,
        sum(map(len, lease.blocks)), lease.content.tokens, lease.on_abort,
        tenant=lease.tenant, bound_to=lease.bound_to, request_time_us=lease.request_time_us,
    )  # fmt: skip
    return mint(claims, state.life.grant_key)
