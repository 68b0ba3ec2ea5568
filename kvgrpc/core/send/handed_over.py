"""Hand-overs to readers that become pushes, because a destination registered under their key before or after them."""

from kvgrpc.core.events import RegisterPush
from kvgrpc.core.send.leases import Leases
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.push import SourcePush
from kvgrpc.core.tables.leases import Lease
from kvgrpc.core.tables.ledger import RowKind
from kvgrpc.core.tables.transfers import Direction, Transfer
from kvgrpc.core.values.grants import AccessKind, Claims, check_tenant, read_claims
from kvgrpc.core.values.owners import Verb, within
from kvgrpc.core.values.parts import Parts
from kvgrpc.errors import AlreadyExists, NotFound, PreconditionFailed, Reason


def registering(event: RegisterPush) -> Claims:
    """Returns the claims of the grant that registers. Raises PreconditionFailed (GRANT_WRONG_ACCESS) for one to read,
    and NotFound (LEASE_NOT_FOUND) for one of another tenant than the caller's.
    """
    claims = read_claims(event.token)
    if claims.access is not AccessKind.WRITE:
        raise PreconditionFailed(Reason.GRANT_WRONG_ACCESS, "a push takes a WRITE grant; this is a READ grant")
    check_tenant(event.call.principal, claims)
    return claims


def registered(state: NodeState, key: bytes, caller: str) -> SourcePush | None:
    """Returns the push under that key. Raises NotFound (TRANSFER_NOT_FOUND) for one of another tenant."""
    push = state.send.pushes.with_key(key)
    if push is not None:
        _check_tenant(state.transfers.get(push.transfer_id), caller)
    return push


def taken(state: NodeState, push: SourcePush, caller: str) -> bool:
    """Returns whether the caller may add no part to a push, which is another caller's or another tenant's."""
    if push.parts is None:
        return not within(caller, state.transfers.get(push.transfer_id).tenant)
    return not state.transfers.may(caller, Verb.ADD_PART, push.transfer_id)


def find(state: NodeState, key: bytes, caller: str) -> Lease | None:
    """Returns the lease handed over under that key that takes registrations. Raises AlreadyExists (TRANSFER_EXISTS)
    when it has, or had, a reader, and NotFound (TRANSFER_NOT_FOUND) when it is of another tenant.
    """
    for transfer in state.transfers.with_key(key):
        lease = state.send.leases.find(transfer.lease_id)
        if lease is None or transfer.over or transfer.direction is not Direction.SEND or not lease.takes_registrations:
            continue
        _check_tenant(transfer, caller)
        if lease.read or lease.done:
            raise AlreadyExists(Reason.TRANSFER_EXISTS, "these blocks are read under their grant already")
        return lease
    return None


def pushed(state: NodeState, leases: Leases, lease: Lease, key: bytes) -> SourcePush:
    """Turns the lease into the one part of a new push. Raises what refuses that part, before anything changes."""
    parts = Parts(state.life.engine.pool, lease.content.tokens, state.limits.blocks_per_request)
    parts.add(parts.check(lease.blocks, None, last=True, after_step=lease.after_step), lease.blocks)
    payer = state.ledger.payer(RowKind.LEASE, lease.id)
    push = SourcePush(
        lease.transfer_id, key, payer, lease.cap, lease_id=lease.id, content=lease.content, parts=parts,
        handed_over=True, consumers=lease.consumers, finished=lease.finished, received=lease.received,
        cancelled_by=lease.cancelled_by, trouble=lease.trouble,
    )  # fmt: skip
    lease.pushed = True
    state.send.leases.weigh(lease)
    state.send.pushes.begin(push)
    leases.extend(lease, state.limits.registration_timeout_s)
    return push


def _check_tenant(transfer: Transfer, caller: str) -> None:
    if not within(caller, transfer.tenant):
        raise NotFound(Reason.TRANSFER_NOT_FOUND, "nothing takes registrations under this transfer key")
