"""The drain as a message: whether the server drains, and what is still in progress, with its owners and deadlines."""

from collections.abc import Iterator
from itertools import islice

from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.leases import Lease
from kvgrpc.core.tables.pins import Pin, PinKind
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.tables.transfers import Transfer
from kvgrpc.service.admission import admission
from kvgrpc.service.identity.tenants import sees, tenant_of_pin
from kvgrpc.service.lead import Lead
from kvgrpc.service.rpc import pins
from kvgrpc.service.rpc.pages import PAGE_BYTES_MAX
from kvgrpc.v1 import admin_pb2
from kvgrpc.wire import answers
from kvgrpc.wire.values import duration

READERS_NAMED_MAX = 16
"""Maximum number of reading engines that the row of a lease names."""
ENDS = (Timer.BLOCKS, Timer.QUEUE, Timer.TRANSFER, Timer.SETTLE, Timer.REGISTRATION, Timer.RENDEZVOUS)
"""Deadlines at which a transfer ends, under its own name or that of one destination of its push."""

_Work = tuple[float, str, Transfer | Lease | Pin]
"""Beginning of the work, its id, and the work."""


def message(lead: Lead, most: int) -> admin_pb2.Drain:
    """Returns the drain as the caller may see it now, with at most `most` rows."""
    state, now = lead.runner.node.state, lead.runner.time()
    open_to, _ = admission(lead)
    found = sorted(_work(state), key=lambda row: row[:2])
    oldest = next((id_ for _, id_, work in found if isinstance(work, Transfer)), "")
    made = admin_pb2.Drain(
        admission=open_to,
        age=duration(now - state.life.drain_began) if state.life.draining else None,
        reason=state.life.drain_reason,
        transfer_count=state.transfers.going_on,
        lease_count=len(state.send.leases),
        quarantined_block_count=sum(state.pool.pins.quarantined),
        oldest_transfer_id=oldest,
        blocker_count=len(found),
    )
    nbytes = 0
    for _, _, work in islice(found, most):
        row = _blocker(lead, work, now)
        made.blockers.append(row)
        nbytes += row.ByteSize()
        if nbytes >= PAGE_BYTES_MAX:
            break
    return made


def _work(state: NodeState) -> Iterator[_Work]:
    """Yields what is in progress and of the caller's tenant."""
    for transfer in state.transfers.unfinished():
        if sees(transfer.tenant):
            yield transfer.created, transfer.id, transfer
    for lease in state.send.leases:
        if sees(lease.tenant):
            yield lease.granted, lease.id, lease
    for pin in state.pool.pins:
        if pin.kind is PinKind.QUARANTINE and sees(tenant_of_pin(state, pin)):
            yield pin.since, pin.owner, pin


def _blocker(lead: Lead, work: Transfer | Lease | Pin, now: float) -> admin_pb2.DrainBlocker:
    node, state = lead.runner.node, lead.runner.node.state
    if isinstance(work, Transfer):
        due = _due(state, work)
        row = admin_pb2.DrainBlocker(
            transfer=answers.transfer(work, now),
            owner=work.owner,
            remaining=None if due is None else duration(max(due - now, 0.0)),
        )
        row.transfer.ClearField("paths")
        return row
    if isinstance(work, Lease):
        times = node.lease_times(work)
        return admin_pb2.DrainBlocker(
            lease=answers.lease(work, times, state.life.incarnation),
            owner=work.owner,
            remaining=duration(times.remaining_s),
            reader_engine_ids=islice(work.readers, READERS_NAMED_MAX),
        )
    transfer = state.transfers.find(work.owner.partition("#")[0])
    return admin_pb2.DrainBlocker(pin=pins.message(node, work, now), owner="" if transfer is None else transfer.owner)


def _due(state: NodeState, transfer: Transfer) -> float | None:
    """Returns the nearest deadline at which a transfer ends: its own, or the end of its lease."""
    push = state.send.pushes.find(transfer.id)
    names = [transfer.id, *(move.name for move in push.registrations.values())] if push else [transfer.id]
    found = [state.timers.when(timer, name) for timer in ENDS for name in names]
    found.append(state.timers.when(Timer.LEASE, transfer.lease_id))
    return min((when for when in found if when is not None), default=None)
