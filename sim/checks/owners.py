"""Checks that a stranger is refused, and that everything keeps its owner (R12)."""

from kvgrpc.core.actions import Acknowledged, Answer, Cancelled, Reclaimed
from kvgrpc.core.events import Call, Event
from kvgrpc.core.state import NodeState
from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.owners import ANONYMOUS
from kvgrpc.errors import KVGrpcError
from sim.rules import Rule, broken

Things = dict[str, object]
"""Everything at a lead that a request can name, by kind."""


def of_stranger(event: Event) -> bool:
    """Returns True if a caller without a ticket sent the event, which must then change nothing."""
    call = getattr(event, "call", None)
    return isinstance(call, Call) and call.principal == ANONYMOUS


def things(state: NodeState) -> Things:
    """Returns a snapshot that is equal while nothing that belongs to anybody changes."""
    allocator, transfers = state.pool.allocator, state.transfers
    allocations = map(str, allocator.kept_bytes)
    return {
        "allocations": {id_: (allocator.owner(id_), _ids(allocator.find(id_) or ())) for id_ in allocations},
        "pins": {(pin.owner, pin.kind): _ids(pin.blocks) for pin in state.pool.pins},
        "leases": {lease.id: (lease.live, lease.deadline, lease.owner) for lease in state.send.leases},
        "transfers": (transfers.seq, transfers.live),
    }


def check_refused(event: Event, result: Answer | KVGrpcError, address: str) -> None:
    """Checks the answer to a stranger that named what is not its own."""
    if isinstance(result, KVGrpcError | Cancelled):  # the stranger owns the key that it cancels
        return
    nothing = (isinstance(result, Acknowledged) and not result.count) or (
        isinstance(result, Reclaimed) and not result.enough
    )
    if not nothing:
        broken(Rule.R12, f"{type(event).__name__} of a stranger is answered well at {address}: {result}")


def check_same(event: Event, before: Things, after: Things, address: str) -> None:
    """Checks that a stranger has changed nothing."""
    for kind, of_before in before.items():
        if after[kind] != of_before:
            broken(Rule.R12, f"{type(event).__name__} of a stranger changes {kind} at {address}")


def _ids(blocks: Blocks) -> tuple[bytes, ...]:
    return tuple(ids.tobytes() for ids in blocks)
