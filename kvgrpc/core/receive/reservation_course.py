"""The course of one reservation: from its registration at the source to the last part, and its ends.

connect -> registered -> opened by the source -> parts -> posted -> settle    if this side moves the bytes
opened by the source -> written                      if the source does, and settles
"""

from kvgrpc.core.actions import Expect, LayersReceivedNews, SendRegister
from kvgrpc.core.events import CloseOutcome
from kvgrpc.core.receive.pull_course import PullCourse, PullEnds
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.move import MoveStage
from kvgrpc.core.state.reservation import ReservationMove, Writer
from kvgrpc.core.tables.accesses import Access, AccessState
from kvgrpc.core.tables.ledger import RowKind
from kvgrpc.core.tables.peers import Peer
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.tables.transfers import Failure
from kvgrpc.core.values.call import LayerRange
from kvgrpc.errors import Reason


def add_writer(state: NodeState, reservation: ReservationMove, access_id: bytes, peer: Peer) -> None:
    """Notes that a source may write under an access. Ranks are told too: they outlive a lead that dies."""
    reservation.writers[access_id] = Writer(peer.key, peer.asks)
    state.receive.open_writes[access_id] = reservation
    state.emit(Expect(_name(access_id), open=True, writes=True))


def drop_writer(state: NodeState, access_id: bytes) -> None:
    """Notes that nothing is written under an access any more."""
    reservation = state.receive.open_writes.pop(access_id, None)
    if reservation is not None:
        del reservation.writers[access_id]
        state.emit(Expect(_name(access_id), open=False, writes=True))


def _name(access_id: bytes) -> str:
    return f"w-{access_id.hex()}"


class ReservationEnds(PullEnds[ReservationMove]):
    """Ends reservations."""

    def stop_reading(self, reservation: ReservationMove) -> None:
        """Closes the access at the source, so that nothing more is read under it; the push goes on."""
        self._closes.close(reservation, CloseOutcome.FAILED)
        self._state.moves.drop_access(reservation)

    def close_access(self, access: Access) -> None:
        """Closes the source's access to write."""
        state = self._state
        access.move(AccessState.CLOSED)
        state.expect(access, open_=False)
        kept_s = max(state.limits.settle_timeout_s, state.limits.open_wait_s)
        state.timers.set(Timer.ACCESS_FORGET, access.id.hex(), state.now + kept_s)

    def proved(self, access_id: bytes, reservation: ReservationMove) -> None:
        """Takes a proof that nothing is written any more under an access of an ended reservation."""
        drop_writer(self._state, access_id)
        self.at_rest(reservation)

    def released_by_operator(self, move: ReservationMove) -> None:
        for access_id in list(move.writers):
            drop_writer(self._state, access_id)

    def _close_writes(self, move: ReservationMove, failure: Failure | None, outcome: CloseOutcome) -> None:
        """Ends the source's access to write: its later calls are refused. They get CANCELLED only if both sides were
        cancelled.
        """
        reason = failure.reason if failure else None
        if failure is not None and outcome is CloseOutcome.CANCELLED:
            self._state.tombstones.end_grant(move.token, failure.message, self._state.now, Reason.CANCELLED)
        elif reason is Reason.CANCELLED:
            reason = Reason.TRANSFER_ENDED
        access = self._state.access.rows.get(move.write_access)
        if access is not None and access.state is AccessState.OPEN:
            self._end_access(access, reason)

    def _end_access(self, access: Access, reason: Reason | None) -> None:
        state = self._state
        access.stale = reason
        if access.id in state.receive.open_writes:
            access.move(AccessState.STALE)
            state.timers.set(Timer.ACCESS_FORGET, access.id.hex(), state.now + state.limits.lease_cap_s)
        else:
            self.close_access(access)

    def _forget(self, pull: ReservationMove) -> None:
        super()._forget(pull)
        del self._state.receive.targets[pull.target_id]
        self._state.ledger.drop(RowKind.PARTS, pull.name)


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
