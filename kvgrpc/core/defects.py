"""A life that a defect of ours ended: what its node decided is performed, and then nothing of it is vouched for.

The tables of a node that raised may be half changed, and what changed them would raise again. So nothing is asked of
its parts any more. What became of its transfers and leases is read out row by row, into the tables of a node that has
handled nothing yet; all else ends with it: accesses, peers, keys and pins.
"""

from collections.abc import Iterable

from kvgrpc.core.actions import SendClose
from kvgrpc.core.events import AccessClosing, CloseOutcome, LifeBegan
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.move import Move
from kvgrpc.core.tables.transfers import Failure, Transfer
from kvgrpc.errors import NextStep, Reason

MESSAGE = "a defect of kvgrpc ended this life of the engine"


def take_over(new: NodeState, old: NodeState, incarnation: int, now: float) -> list[Transfer]:
    """Begins a life without an engine in `new`, which is a fresh one, after the life of `old`. The last changes of its
    transfers: those that were not over have failed with INTERNAL_DEFECT.
    """
    new.now = max(now, old.now)
    new.life.go_on_draining(old.life)
    new.begin(LifeBegan(incarnation, b"", None))
    new.life.defect = f"{MESSAGE}, and the next one has not begun"
    new.send.leases.take_over(old.send.leases, new.now)
    return new.transfers.take_over(
        old.transfers, Failure(Reason.INTERNAL_DEFECT, MESSAGE, next=NextStep.RECOMPUTE), new.now
    )


def closings(moves: Iterable[Move], incarnation: int) -> list[SendClose]:
    """Closes the accesses of a life at peers. They say that none of its postings accesses a peer's memory any more,
    which nothing here can know: it is said where that is proved, and else not at all.
    """
    return [
        SendClose(
            move.peer,
            AccessClosing(move.access_id, CloseOutcome.FAILED, quiesced=True, token=move.token, message=MESSAGE),
            incarnation,
            move.trace,
            proves=True,
        )
        for move in moves
    ]
