"""How pulls end, and what becomes of their blocks.

Success needs a VALID settle; everything else fails closed. Blocks that a posting may still touch stay in quarantine
until it ended, whatever became of the transfer.
"""

from typing import Protocol

from kvgrpc.core.actions import BlocksReturned, Failed, Received
from kvgrpc.core.moves.failures import move_failure
from kvgrpc.core.moves.move import MOVE_TIMERS, MoveTable, Stage
from kvgrpc.core.moves.pending_closes import PendingCloses
from kvgrpc.core.receive.pull import Pull
from kvgrpc.core.receive.reservation import Reservation
from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.transfers import Disposition, Failure, State
from kvgrpc.errors import KVGrpcError, Reason


class Deliveries(Protocol):
    """The pushes that land here."""

    def ended(self, landing: Reservation, reason: Reason | None = None) -> None: ...

    def forgotten(self, landing: Reservation) -> None: ...


class PullEnds:
    """The ends of all pulls."""

    def __init__(self, state: NodeState, pulls: MoveTable[Pull], closings: PendingCloses) -> None:
        self._state = state
        self._pulls = pulls
        self._closings = closings

    def attach(self, deliveries: Deliveries) -> None:
        """Names who is told of the ends of pushes that land here; once, when the node is built."""
        self._deliveries = deliveries

    def succeed(self, pull: Pull) -> None:
        """The source vouched for the bytes: they are the engine's."""
        state = self._state
        assert pull.stage is Stage.SETTLING
        assert not pull.busy
        pull.move(Stage.ENDED)
        if isinstance(pull, Reservation):
            self._deliveries.ended(pull)
        self._clear_timers(pull)
        state.pins.drop(pull.transfer_id, PinKind.TARGET)
        transfer = state.change(pull.transfer_id, state=State.SUCCEEDED, memory=Disposition.RETURNED)
        state.tell(transfer.owner, Received(transfer.id, transfer.request_id, transfer.use_tokens))
        self._forget(pull)

    def fail(self, move: Pull, error: KVGrpcError, *, closed: bool = False) -> None:
        """Ends a pull with an error. `closed`: there is no access to close at the source."""
        self.fail_with(move, error.reason, error.message, closed=closed)

    def fail_with(
        self, move: Pull, reason: Reason, message: str, *, closed: bool = False, rank: int | None = None
    ) -> None:
        """As `fail`."""
        self.end(move, State.FAILED, move_failure(move, reason, message, rank), closed=closed)

    def end(self, pull: Pull, end: State, failure: Failure, *, closed: bool = False) -> None:
        """Ends a pull without success."""
        state = self._state
        self._clear_timers(pull)
        memory = Disposition.QUARANTINED if pull.busy else Disposition.RETURNED
        transfer = state.change(pull.transfer_id, state=end, failure=failure, memory=memory)
        if isinstance(pull, Reservation):
            self._deliveries.ended(pull, failure.reason)
        dropped = end is State.CANCELLED or failure.reason is Reason.ENGINE_LOST
        if isinstance(pull, Reservation) and dropped:
            state.bury_key(transfer.key, failure.message)
        if not closed:
            self._closings.close(pull, dropped=dropped, message=failure.message)
        pull.move(Stage.ENDED)
        self._pulls.over(pull)
        state.tell(transfer.owner, Failed(transfer.id, transfer.request_id, failure, end is State.CANCELLED))
        if pull.busy:
            if not pull.moves_nothing:
                state.pins.quarantine(pull.transfer_id, state.now)
            return
        state.pins.drop(pull.transfer_id, PinKind.TARGET)
        state.tell(transfer.owner, BlocksReturned(transfer.id, transfer.request_id))
        self._forget(pull)

    def close(self, landing: Reservation) -> None:
        """Nothing more is read under its access, but the push goes on."""
        self._closings.close(landing, dropped=False)
        self._pulls.drop_access(landing)

    def at_rest(self, move: Pull) -> None:
        """Nothing accesses the blocks of an ended pull any more: they come back."""
        state = self._state
        state.pins.drop(move.transfer_id, PinKind.QUARANTINE)
        transfer = state.change(move.transfer_id, memory=Disposition.RETURNED)
        state.tell(transfer.owner, BlocksReturned(transfer.id, transfer.request_id))
        self._forget(move)

    def _forget(self, pull: Pull) -> None:
        self._pulls.remove(pull)
        if isinstance(pull, Reservation):
            self._deliveries.forgotten(pull)

    def _clear_timers(self, pull: Pull) -> None:
        self._state.turns.leave(pull.name)
        pull.left = None
        for timer in MOVE_TIMERS:
            self._state.timers.clear(timer, pull.name)
