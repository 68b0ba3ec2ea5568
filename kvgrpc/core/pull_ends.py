"""How pulls end, and what becomes of their blocks.

Success needs a VALID settle; everything else fails closed. Blocks that a posting may still touch stay in quarantine
until it ended, whatever became of the transfer.
"""

from kvgrpc.core.actions import BlocksReturned, Failed, Received
from kvgrpc.core.closing import Closings
from kvgrpc.core.pins import PinKind
from kvgrpc.core.pull import PULL_TIMERS, Pull, Stage, pull_failure
from kvgrpc.core.pull_table import PullTable
from kvgrpc.core.state import NodeState
from kvgrpc.core.transfers import Disposition, Failure, State
from kvgrpc.errors import KVGrpcError, Reason


class PullEnds:
    """The ends of all pulls."""

    def __init__(self, state: NodeState, pulls: PullTable, closings: Closings) -> None:
        self._state = state
        self._pulls = pulls
        self._closings = closings

    def succeed(self, pull: Pull) -> None:
        """The source vouched for the bytes: they are the engine's."""
        state = self._state
        assert pull.stage is Stage.SETTLING
        assert not pull.postings
        pull.move(Stage.ENDED)
        self._clear_timers(pull)
        state.pins.drop(pull.transfer_id, PinKind.TARGET)
        transfer = state.change(pull.transfer_id, state=State.SUCCEEDED, memory=Disposition.RETURNED)
        state.tell(transfer.owner, Received(transfer.id, transfer.request_id, transfer.use_tokens))
        self._pulls.remove(pull)

    def fail(self, pull: Pull, error: KVGrpcError, *, closed: bool = False) -> None:
        """Ends a pull with an error. `closed`: there is no access to close at the source."""
        self.fail_with(pull, error.reason, error.message, closed=closed)

    def fail_with(
        self, pull: Pull, reason: Reason, message: str, *, closed: bool = False, rank: int | None = None
    ) -> None:
        """As `fail`."""
        self.end(pull, State.FAILED, pull_failure(pull, reason, message, rank), closed=closed)

    def end(self, pull: Pull, end: State, failure: Failure, *, closed: bool = False) -> None:
        """Ends a pull without success."""
        state = self._state
        self._clear_timers(pull)
        memory = Disposition.QUARANTINED if pull.postings else Disposition.RETURNED
        transfer = state.change(pull.transfer_id, state=end, failure=failure, memory=memory)
        if not closed:
            dropped = end is State.CANCELLED or failure.reason is Reason.ENGINE_LOST
            self._closings.close(pull, dropped=dropped)
        pull.move(Stage.ENDED)
        state.tell(transfer.owner, Failed(transfer.id, transfer.request_id, failure, end is State.CANCELLED))
        if pull.postings:
            state.pins.quarantine(pull.transfer_id, state.now)
            return
        state.pins.drop(pull.transfer_id, PinKind.TARGET)
        state.tell(transfer.owner, BlocksReturned(transfer.id, transfer.request_id))
        self._pulls.remove(pull)

    def at_rest(self, pull: Pull) -> None:
        """The last posting of an ended pull is over: its blocks come back."""
        state = self._state
        state.pins.drop(pull.transfer_id, PinKind.QUARANTINE)
        transfer = state.change(pull.transfer_id, memory=Disposition.RETURNED)
        state.tell(transfer.owner, BlocksReturned(transfer.id, transfer.request_id))
        self._pulls.remove(pull)

    def _clear_timers(self, pull: Pull) -> None:
        for timer in PULL_TIMERS:
            self._state.timers.clear(timer, pull.transfer_id)
