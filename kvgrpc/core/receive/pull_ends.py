"""How pulls end, and what becomes of their blocks.

Success needs a VALID settle; everything else fails closed. Blocks that a posting may still touch stay in quarantine
until it ended, whatever became of the transfer.
"""

from typing import TypeVar

from kvgrpc.core.actions import BlocksReturned, Failed, Received
from kvgrpc.core.events import CloseOutcome
from kvgrpc.core.moves.ends import Ends
from kvgrpc.core.moves.failures import move_failure
from kvgrpc.core.state.move import Stage
from kvgrpc.core.state.pull import Pull
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.transfers import Disposition, Failure, State
from kvgrpc.errors import Reason

P = TypeVar("P", bound=Pull)


class PullEnds(Ends[P]):
    """The ends of pulls, and what those of reservations have in common with them."""

    def succeed(self, pull: P) -> None:
        """The source vouched for the bytes: they are the engine's."""
        state = self._state
        assert pull.stage is Stage.SETTLING
        assert not pull.busy
        pull.move(Stage.ENDED)
        self._close_writes(pull, None, CloseOutcome.FAILED)
        self._stop(pull)
        state.pins.drop(pull.transfer_id, PinKind.TARGET)
        transfer = state.change(pull.transfer_id, state=State.SUCCEEDED, memory=Disposition.RETURNED)
        news = Received(transfer.id, transfer.request_id, transfer.use_tokens, pull.telemetry)
        state.tell(transfer.owner, news)
        self._forget(pull)

    def fail_with(
        self, move: P, reason: Reason, message: str, *, closed: bool = False, rank: int | None = None
    ) -> None:
        """A peer that says CANCELLED was cancelled, and so is this side."""
        failure = move_failure(move, reason, message, rank)
        if reason is Reason.CANCELLED:
            self.end(move, State.CANCELLED, failure, CloseOutcome.CANCELLED, closed=closed)
        else:
            self.end(move, State.FAILED, failure, closed=closed)

    def end(
        self,
        pull: P,
        end: State,
        failure: Failure,
        outcome: CloseOutcome = CloseOutcome.FAILED,
        *,
        closed: bool = False,
    ) -> None:
        """Ends a pull without success. `outcome` is what the other side is told."""
        state = self._state
        self._stop(pull)
        memory = Disposition.QUARANTINED if pull.busy else Disposition.RETURNED
        transfer = state.change(pull.transfer_id, state=end, failure=failure, memory=memory)
        self._close_writes(pull, failure, outcome)
        if not closed:
            self._closes.close(pull, outcome, failure.message)
        pull.move(Stage.ENDED)
        state.moves.over(pull)
        state.tell(transfer.owner, Failed(transfer.id, transfer.request_id, failure, end is State.CANCELLED))
        if pull.busy:
            if not pull.moves_nothing:
                state.pins.quarantine(pull.transfer_id, state.now)
            return
        state.pins.drop(pull.transfer_id, PinKind.TARGET)
        state.tell(transfer.owner, BlocksReturned(transfer.id, transfer.request_id))
        self._forget(pull)

    def at_rest(self, move: P) -> None:
        """Nothing accesses the blocks of an ended pull any more: they come back."""
        state = self._state
        state.pins.drop(move.transfer_id, PinKind.QUARANTINE)
        transfer = state.change(move.transfer_id, memory=Disposition.RETURNED)
        state.tell(transfer.owner, BlocksReturned(transfer.id, transfer.request_id))
        self._forget(move)

    def _close_writes(self, move: P, failure: Failure | None, outcome: CloseOutcome) -> None:
        """What a source may write is over; only reservations let one write."""

    def _forget(self, pull: P) -> None:
        self._state.moves.remove(pull)
        del self._state.receives[pull.transfer_id]
