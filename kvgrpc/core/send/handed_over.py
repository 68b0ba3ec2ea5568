"""Hand-overs to readers that become pushes, because a destination registered under their key before or after them."""

from kvgrpc.core.send.leases import Leases
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.push import SourcePush
from kvgrpc.core.tables.leases import Lease
from kvgrpc.core.tables.ledger import RowKind
from kvgrpc.core.tables.transfers import Direction
from kvgrpc.core.values.parts import Parts
from kvgrpc.errors import AlreadyExists, Reason


def find(state: NodeState, key: bytes) -> Lease | None:
    """Returns the lease handed over under that key that takes registrations. Raises AlreadyExists (TRANSFER_EXISTS)
    when it has, or had, a reader.
    """
    for transfer in state.transfers.with_key(key):
        lease = state.send.leases.find(transfer.lease_id)
        if lease is None or transfer.over or transfer.direction is not Direction.SEND or not lease.takes_registrations:
            continue
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
