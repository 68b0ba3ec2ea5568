"""The course of one reservation: from its registration at the source to the last part.

connect -> registered -> opened by the source -> parts -> posted -> settle    where this side moves the bytes
opened by the source -> written                      where the source does, and settles
"""

from kvgrpc.core.actions import LayersReceived, SendRegister
from kvgrpc.core.receive.pull_course import PullCourse
from kvgrpc.core.receive.reservation_ends import ReservationEnds
from kvgrpc.core.state.move import Stage
from kvgrpc.core.state.reservation import Reservation
from kvgrpc.core.tables.ledger import RowKind
from kvgrpc.core.tables.peers import Peer
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.values.calls import LayerRange
from kvgrpc.errors import Reason


class ReservationCourse(PullCourse[Reservation]):
    """What happens to a reservation between its making and its end."""

    ends: ReservationEnds

    def reached(self, move: Reservation, peer: Peer) -> None:
        """The source's lead is connected: the reservation is registered there."""
        self._state.moves.bind(move, peer.key)
        self.send_open(move)

    def send_open(self, move: Reservation) -> None:
        """Tells the source where the blocks go; it opens the access."""
        request_id = self._state.transfers.get(move.transfer_id).request_id
        self._state.emit(SendRegister(move.peer, move.transfer_id, move.token, request_id, move.trace))

    def settled(self, move: Reservation) -> None:
        """The source's lease held throughout the round."""
        if move.last_round:
            self.ends.succeed(move)
            return
        assert move.parts is not None
        assert move.progress is not None
        move.progress.settle(move.parts, move.posted)
        self._next_round(move)
        self.parts_arrived(move, move.progress.layers_done)
        self.try_post(move)

    def stale(self, move: Reservation, reason: Reason, message: str) -> None:
        """A push whose source took its parts back goes on with the next ones."""
        if reason in (Reason.LEASE_VOIDED, Reason.PREEMPTED):
            self.start_over(move)
        else:
            super().stale(move, reason, message)

    def parts_arrived(self, move: Reservation, layers_done: tuple[LayerRange, ...]) -> None:
        """More of a push is there: its layers may be used provisionally, and the next part has its time. Not where the
        first tokens alone come: a step that counts on the others would compute from what is in their blocks now.
        """
        state = self._state
        self.await_part(move)
        layers_done = () if move.unfilled else layers_done
        epoch = move.part_epoch
        if state.transfers.get(move.transfer_id).layers_done != layers_done:
            transfer = state.change(move.transfer_id, layers_done=layers_done, part_epoch=epoch)
            state.tell(transfer.owner, LayersReceived(transfer.id, transfer.request_id, layers_done, epoch))

    def start_over(self, move: Reservation) -> None:
        """The source has replaced its parts, or taken them back: what is here of them counts no more."""
        state = self._state
        for timer in (Timer.SETTLE, Timer.SETTLE_RETRY, Timer.TRANSFER, Timer.CHECKSUMS_ASK):
            state.timers.clear(timer, move.name)
        state.turns.leave(move.name)
        move.left = move.comparing = None
        if move.parts is not None and move.access_id:
            self.ends.stop_reading(move)
        move.rewind()
        self._state.ledger.drop(RowKind.PARTS, move.name)
        if move.stage is not Stage.RENDEZVOUS:
            move.move(Stage.RENDEZVOUS)
        state.change(move.transfer_id, waiting_for="parts")
        self.parts_arrived(move, ())

    def await_part(self, move: Reservation) -> None:
        """The source has so long for its next part."""
        state = self._state
        wait_s = move.registration_timeout_s
        if move.writers:  # what it writes is known here when it has moved
            wait_s += move.bytes_timeout_s(move.expected, state.limits)
        due = min(state.now + wait_s, move.cap)
        state.timers.set(Timer.REGISTRATION, move.name, max(due, state.now))
