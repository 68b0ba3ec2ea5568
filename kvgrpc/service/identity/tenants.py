"""Tenants of lists: a caller with a tenant sees the rows of its tenant, and no others."""

from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.pins import Pin, PinKind
from kvgrpc.errors import invalid
from kvgrpc.service.identity.gate import CALLER


def sees(tenant: str) -> bool:
    """Returns whether the caller of the served call sees rows of that tenant. A caller of none sees all rows."""
    mine = CALLER.get().tenant
    return not mine or mine == tenant


def searched(tenant: str) -> str:
    """Returns the tenant whose things the served call searches: its caller's, or the stated one. Raises InvalidRequest
    for another one than the caller's.
    """
    mine = CALLER.get().tenant
    if tenant and mine not in ("", tenant):
        raise invalid("tenant", "is the caller's own, or left out")
    return tenant or mine


def tenant_of_pin(state: NodeState, pin: Pin) -> str:
    """Returns the tenant of the lease or the transfer that pins; empty if neither has one."""
    if pin.kind is PinKind.LEASE:
        return state.send.leases.get(pin.owner).tenant
    if pin.owner.startswith("a-"):
        access = state.access.rows[bytes.fromhex(pin.owner.removeprefix("a-"))]
        lease = state.send.leases.find(access.lease_id)
        if lease is not None:
            return lease.tenant
        owner = access.lease_id
    else:
        owner = pin.owner.partition("#")[0]
    transfer = state.transfers.find(owner)
    return "" if transfer is None else transfer.tenant
