"""The ends of pulls, and the fate of their blocks.

Success needs a VALID settle; everything else fails closed. Blocks that a posting may still touch stay in quarantine
until it ended, even if the transfer is over.
"""

from typing import TypeVar

from kvgrpc.core.actions import BlocksReturnedNews, FailedNews, ReceivedNews
from kvgrpc.core.events import CloseOutcome
from kvgrpc.core.moves.ends import Ends
from kvgrpc.core.moves.failures import move_failure
from kvgrpc.core.state.move import MoveStage
from kvgrpc.core.state.pull import PullMove
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.transfers import Disposition, Failure, State
from kvgrpc.errors import Reason

P = TypeVar("P", bound=PullMove)


class PullEnds(Ends[P]):
    """Ends pulls. The ends of reservations extend it."""

    def succeed(self, pull: P) -> None:
        """Ends a pull with success: the source vouched for the bytes, and the blocks are the engine's."""
        state = self._state
        assert pull.stage is MoveStage.SETTLING
        assert not pull.busy
        pull.move(MoveStage.ENDED)
        self._close_writes(pull, None, CloseOutcome.FAILED)
        self._stop(pull)
        state.pool.pins.drop(pull.transfer_id, PinKind.TARGET)
        transfer = state.change(pull.transfer_id, state=State.SUCCEEDED, memory=Disposition.RETURNED)
        news = ReceivedNews(transfer.id, transfer.request_id, transfer.use_tokens, pull.telemetry)
        state.tell(transfer.owner, news)
        self._forget(pull)

    def fail_with(
        self, move: P, reason: Reason, message: str, *, closed: bool = False, rank: int | None = None
    ) -> None:
        """Ends a pull for this reason. A peer's CANCELLED cancels this side too."""
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
        pull.move(MoveStage.ENDED)
        state.moves.over(pull)
        state.tell(transfer.owner, FailedNews(transfer.id, transfer.request_id, failure, end is State.CANCELLED))
        if pull.busy:
            if not pull.moves_nothing:
                state.pool.pins.quarantine(pull.transfer_id, state.now)
            return
        state.pool.pins.drop(pull.transfer_id, PinKind.TARGET)
        state.tell(transfer.owner, BlocksReturnedNews(transfer.id, transfer.request_id))
        self._forget(pull)

    def at_rest(self, move: P) -> None:
        """Gives back the blocks of an ended pull: nothing accesses them any more."""
        state = self._state
        state.pool.pins.drop(move.transfer_id, PinKind.QUARANTINE)
        transfer = state.change(move.transfer_id, memory=Disposition.RETURNED)
        state.tell(transfer.owner, BlocksReturnedNews(transfer.id, transfer.request_id))
        self._forget(move)

    def _close_writes(self, move: P, failure: Failure | None, outcome: CloseOutcome) -> None:
        """Ends a source's access to write; only reservations have one."""

    def _forget(self, pull: P) -> None:
        self._state.moves.remove(pull)
        del self._state.receive.transfers[pull.transfer_id]
