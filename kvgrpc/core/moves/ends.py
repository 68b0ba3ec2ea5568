"""The common parts of how moves end. Each kind of move has ends of its own, in `receive` and `send`."""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from kvgrpc.core.moves.pending_closes import PendingCloses
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.move import Move
from kvgrpc.errors import KVGrpcError, Reason

M = TypeVar("M", bound=Move)


class Ends(ABC, Generic[M]):
    """Ends the moves of one kind, and decides what becomes of their memory."""

    def __init__(self, state: NodeState, closes: PendingCloses) -> None:
        self._state = state
        self._closes = closes

    def fail(self, move: M, error: KVGrpcError, *, closed: bool = False) -> None:
        """Ends a move with an error. `closed`: there is no access to close at the peer."""
        self.fail_with(move, error.reason, error.sentence, closed=closed)

    @abstractmethod
    def fail_with(
        self, move: M, reason: Reason, message: str, *, closed: bool = False, rank: int | None = None
    ) -> None:
        """Ends a move for this reason; see `fail`."""

    @abstractmethod
    def at_rest(self, move: M) -> None:
        """Takes the proof that nothing accesses the blocks of an ended move any more."""

    def released_by_operator(self, move: M) -> None:
        """Takes an operator's word that no peer writes into the blocks of an ended move any more."""
