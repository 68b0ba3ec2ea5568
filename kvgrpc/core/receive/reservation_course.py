"""The course of one reservation: from its registration at the source to the last part.

connect -> registered -> opened by the source -> parts -> posted -> settle    if this side moves the bytes
opened by the source -> written                      if the source does, and settles
"""

from kvgrpc.core.actions import LayersReceivedNews, SendRegister
from kvgrpc.core.receive.pull_course import PullCourse
from kvgrpc.core.receive.reservation_ends import ReservationEnds
from kvgrpc.core.state.move import MoveStage
from kvgrpc.core.state.reservation import ReservationMove
from kvgrpc.core.tables.ledger import RowKind
from kvgrpc.core.tables.peers import Peer
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.values.call import LayerRange
from kvgrpc.errors import Reason


class ReservationCourse(PullCourse[ReservationMove]):
    """Takes a reservation from its start to its end."""

    ends: ReservationEnds

    def reached(self, move: ReservationMove, peer: Peer) -> None:
        """Registers the reservation at the source, whose lead is connected."""
        self._state.moves.bind(move, peer.key)
        self.send_open(move)

    def send_open(self, move: ReservationMove) -> None:
        """Tells the source where the blocks go; it opens the access."""
        request_id = self._state.transfers.get(move.transfer_id).request_id
        self._state.emit(SendRegister(move.peer, move.transfer_id, move.token, request_id, move.trace))

    def settled(self, move: ReservationMove) -> None:
        """Continues or ends a reservation: the source's lease held throughout the round."""
        if move.last_round:
            self.ends.succeed(move)
            return
        assert move.parts is not None
        assert move.progress is not None
        move.progress.settle(move.parts, move.posted)
        self._next_round(move)
        self.parts_arrived(move, move.progress.layers_done)
        self.try_post(move)

    def stale(self, move: ReservationMove, reason: Reason, message: str) -> None:
        """Starts a push over if its source took its parts back: the next parts may come. Else fails it."""
        if reason in (Reason.LEASE_VOIDED, Reason.PREEMPTED):
            self.start_over(move)
        else:
            super().stale(move, reason, message)

    def parts_arrived(self, move: ReservationMove, layers_done: tuple[LayerRange, ...]) -> None:
        """Tells the engine which layers have arrived, provisionally, and restarts the deadline of the next part. If
        only the first tokens come, no layer is told: a step that counts on the others would compute from what their
        blocks hold now.
        """
        state = self._state
        self.await_part(move)
        layers_done = () if move.unfilled else layers_done
        epoch = move.part_epoch
        if state.transfers.get(move.transfer_id).layers_done != layers_done:
            transfer = state.change(move.transfer_id, layers_done=layers_done, part_epoch=epoch)
            state.tell(transfer.owner, LayersReceivedNews(transfer.id, transfer.request_id, layers_done, epoch))

    def start_over(self, move: ReservationMove) -> None:
        """Discards the parts: the source has replaced them, or taken them back."""
        state = self._state
        state.timers.clear_some((Timer.SETTLE, Timer.SETTLE_RETRY, Timer.TRANSFER, Timer.CHECKSUMS_ASK), move.name)
        state.moves.turns.leave(move.name)
        move.left = move.comparison = None
        if move.parts is not None and move.access_id:
            self.ends.stop_reading(move)
        move.rewind()
        self._state.ledger.drop(RowKind.PARTS, move.name)
        if move.stage is not MoveStage.RENDEZVOUS:
            move.move(MoveStage.RENDEZVOUS)
        state.change(move.transfer_id, waiting_for="parts")
        self.parts_arrived(move, ())

    def await_part(self, move: ReservationMove) -> None:
        """Sets the deadline for the source's next part."""
        state = self._state
        wait_s = move.registration_timeout_s
        if move.writers:  # parts of a source that writes are known here once they have moved
            wait_s += move.bytes_timeout_s(move.expected, state.limits)
        due = min(state.now + wait_s, move.cap)
        state.timers.set(Timer.REGISTRATION, move.name, max(due, state.now))
