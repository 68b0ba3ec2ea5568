"""Dispatches events to moves: peers that come and go, answers to calls, ends of postings, deadlines.

A move's course, or its ends, decide what follows.
"""

from collections.abc import Collection
from typing import Any

from kvgrpc.core.actions import Operation
from kvgrpc.core.events import (
    AccessAnswered,
    ChecksumsAnswered,
    ChecksumsComputed,
    Opened,
    PostingEnded,
    RegisterAnswered,
    SettleAnswered,
    StepDone,
)
from kvgrpc.core.moves.course import Course
from kvgrpc.core.moves.failures import TIMEOUTS
from kvgrpc.core.peers.liveness import PeerLiveness
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.move import AT_ISSUER, Move, MoveStage, rank_of
from kvgrpc.core.state.reservation import ReservationMove
from kvgrpc.core.tables.accesses import Verdict
from kvgrpc.core.tables.peers import Peer
from kvgrpc.core.tables.timers import Timer
from kvgrpc.errors import KVGrpcError, Reason

RETRY_DELAY_S = 0.2
"""Delay before an unanswered call to a peer is retried, in seconds; short against every timeout that bounds the
retries.
"""


class Moves:
    """All moves of this engine."""

    def __init__(self, state: NodeState, liveness: PeerLiveness, courses: dict[type[Move], Course[Any]]) -> None:
        self._state = state
        self._liveness = liveness
        self._courses = courses

    def course(self, move: Move) -> Course[Any]:
        return self._courses[type(move)]

    # -- peers

    def peer_ready(self, address: str, peer: Peer) -> None:
        """Continues the moves that wait for the lead at an address."""
        found = peer.description.engine_id
        for move in self._take_waiting(address):
            course = self.course(move)
            if move.claims.engine_id not in ("", found):
                message = f"engine {found} answers at {address}, {move.claims.engine_id} was expected"
                course.ends.fail_with(move, Reason.WRONG_ENGINE, message)
            elif move.stage in AT_ISSUER:
                course.take_turn(move)
            else:
                course.meet(move, peer)

    def peer_failed(self, address: str, error: KVGrpcError, expected: str | None, lead: Peer | None) -> None:  # noqa: ARG002
        """Fails the moves that wait for the lead at an address. If `expected` is stated, only moves that expect that
        engine fail; the others go on.
        """
        for move in self._take_waiting(address):
            course = self.course(move)
            if expected in (None, move.claims.engine_id):
                course.ends.fail(move, error)
            elif move.stage in AT_ISSUER:
                course.take_turn(move)
            else:
                course.connect(move)

    def peer_dead(self, peer: Peer) -> None:
        """Fails the moves with a dead life of a peer."""
        self._fail_all(peer, Reason.PEER_LOST, f"engine {peer.description.engine_id} was declared dead", dead=True)

    def peer_replaced(self, peer: Peer) -> None:
        """Registers the reservations that a dead life has not taken at its successor. Handshakes with the dead life
        have ended before.
        """
        for move in self._state.moves.of_peer(peer.key):
            if _outlives(move, peer):
                self._state.timers.clear(Timer.OPEN_RETRY, move.name)
                self.course(move).connect(move)

    def memory_changed(self, peer: Peer) -> None:
        """Fails the moves with memory that was registered again."""
        self._fail_all(peer, Reason.MEMORY_CHANGED, f"engine {peer.description.engine_id} registered its memory again")

    def rekey_begins(self) -> None:
        """Fails the moves that have an access, or ask for one: this engine's own memory is about to be registered
        again.
        """
        for move in self._state.moves:
            if move.stage in (MoveStage.OPENING, *AT_ISSUER):
                message = "this engine registers its memory again"
                self.course(move).ends.fail_with(move, Reason.MEMORY_CHANGED, message)

    def release_by_operator(self, transfer_ids: Collection[str]) -> None:
        """Takes an operator's word that nothing accesses the blocks of these ended transfers any more; of all, if none
        is named.
        """
        for move in self._state.moves:
            if move.stage is MoveStage.ENDED and move.busy and (not transfer_ids or move.transfer_id in transfer_ids):
                move.writes_may_land |= bool(move.postings)  # the operator's word covers this engine's memory only
                for posting_id in list(move.postings):
                    self._state.moves.posting_over(move, posting_id)
                ends = self.course(move).ends
                ends.released_by_operator(move)
                ends.at_rest(move)

    def access_answered(self, event: AccessAnswered) -> None:
        """Handles the peer's answer to OpenAccess."""
        move = self._state.moves.of_access(event.access_id)
        if move is None or move.stage is not MoveStage.OPENING:
            return
        if isinstance(event.result, Opened):
            self.course(move).opened(move, event.result)
        elif event.result.reason in (Reason.NO_HANDSHAKE, Reason.NOT_PROVED):
            self.course(move).reconnect(move)
        elif event.retryable or event.result.reason is Reason.DEADLINE:
            # An issuer waits for less long than this side does, for example for a step of its engine.
            self._state.timers.set(Timer.OPEN_RETRY, move.name, self._state.now + RETRY_DELAY_S)
        else:
            self.course(move).ends.fail(move, event.result)

    def register_answered(self, event: RegisterAnswered) -> None:
        """Retries or fails a reservation that its source did not take. An error of a former life means nothing."""
        move = self._state.moves.find(event.transfer_id)
        if type(move) is not ReservationMove or move.stage is not MoveStage.RENDEZVOUS:
            return
        if event.error is None:
            move.taken_by = event.life
        elif event.life != move.peer:
            return
        elif event.retryable:
            self._state.timers.set(Timer.OPEN_RETRY, move.name, self._state.now + RETRY_DELAY_S)
        else:
            self.course(move).ends.fail(move, event.error)

    def settle_answered(self, event: SettleAnswered) -> None:
        """Handles the peer's verdict."""
        move = self._state.moves.of_access(event.access_id)
        if move is None or move.stage is not MoveStage.SETTLING:
            return
        course, result = self.course(move), event.result
        if isinstance(result, Verdict):
            if result.valid and move.mismatch:
                course.ends.fail_with(move, Reason.CHECKSUM_MISMATCH, move.mismatch)
            elif result.valid:
                course.settled(move)
            else:
                reason = result.reason or Reason.PEER_FAILED
                # Only this lead declares a peer dead.
                course.stale(move, Reason.PEER_FAILED if reason is Reason.PEER_LOST else reason, result.message)
        elif result.reason is Reason.NO_HANDSHAKE:
            self._liveness.forget(move.peer)
            message = "the peer restarted, or declared this engine dead, before it settled"
            # A peer that does not know us has no read of ours. Only the close proves that our writes there are at rest.
            closed = move.operation is Operation.READ
            course.ends.fail_with(move, Reason.INCARNATION_CHANGED, message, closed=closed)
        elif event.retryable:
            self._state.timers.set(Timer.SETTLE_RETRY, move.name, self._state.now + RETRY_DELAY_S)
        else:
            course.ends.fail(move, result)

    # -- ranks

    def posting_ended(self, event: PostingEnded) -> None:
        """Handles the end of a posting. The last posting of an ended transfer proves its blocks to be at rest."""
        move = self._state.moves.of_posting(event.posting_id)
        if move is None:
            return
        if not event.quiesced and not (event.own_at_rest and move.operation is Operation.WRITE):
            self._lost(move, event)
            return
        self._state.moves.posting_over(move, event.posting_id)
        move.writes_may_land |= not event.quiesced
        if event.done:
            self._count(move, event)
        # Replaced parts need not arrive, but the next parts must not race them.
        needed = move.stage is not MoveStage.RENDEZVOUS or not event.quiesced
        if not event.done and needed and move.stage is not MoveStage.ENDED:
            self._broke(move, event)
            self._liveness.map_anew(move.peer)
        elif not move.postings:
            self._state.moves.turns.ended(move.name)
            self._at_rest(move)

    def checksums_answered(self, event: ChecksumsAnswered) -> None:
        """Takes the source's checksums of a round, or of some of its blocks."""
        move = self._move_of_comparison(event.name)
        if move is None or move.comparison is None or event.number != len(move.comparison.there):
            return
        course = self.course(move)
        if not isinstance(event.result, KVGrpcError):
            move.comparison.there.append(event.result)
            if move.comparison.all_there:
                course.compare(move)
            else:
                course.ask_checksums(move)
        elif event.retryable:
            self._state.timers.set(Timer.CHECKSUMS_ASK, move.name, self._state.now + RETRY_DELAY_S)
        else:
            course.ends.fail(move, event.result)

    def checksums_computed(self, event: ChecksumsComputed) -> None:
        """Takes a rank's checksums of one slice of a round."""
        name, _, number = event.name.rpartition(".")
        move = self._move_of_comparison(name)
        if move is None or move.comparison is None:
            return
        slices = move.comparison.here
        if not number.isdecimal() or int(number) >= len(slices):
            return
        if slices[int(number)].take(event.rank, event.values, event.message):
            self.course(move).compare(move)

    def step_done(self, _: StepDone) -> None:
        """Retries moves that waited for the engine's step."""
        for move in self._state.moves.take_stepping():
            self.course(move).try_post(move)

    # -- turns and deadlines

    def give_turns(self) -> None:
        """Gives turns to waiting moves, by priority, while there is room."""
        self._state.moves.turns.paused = bool(self._state.pool.rekeying)
        while (name := self._state.moves.turns.next()) is not None:
            move = self._state.moves.find(name)
            assert move is not None
            self.course(move).take_turn(move)

    def due(self, timer: Timer, name: str) -> None:
        """Handles a move's deadline: sends the unanswered call again, or fails the move."""
        move = self._state.moves.find(name)
        assert move is not None
        course = self.course(move)
        if timer in course.retries:
            course.retries[timer](move)
        else:
            reason, message = TIMEOUTS[timer]
            course.ends.fail_with(move, reason, message.format(phase=move.stage.value))

    def _take_waiting(self, address: str) -> list[Move]:
        """Removes and returns moves that waited for the lead at an address, or for its memory to be mapped again."""
        return [*self._state.moves.take_address(address), *self._state.moves.take_unmapped(address)]

    def _move_of_comparison(self, name: str) -> Move | None:
        """Returns the move that compares the checksums of its round under this name."""
        move = self._state.moves.find(name[1:].rpartition("/")[0])
        if move is None or move.stage is not MoveStage.WIRE or move.comparison is None or move.comparison.name != name:
            return None
        return move

    def _at_rest(self, move: Move) -> None:
        """Continues a move of which nothing is in flight any more."""
        course = self.course(move)
        if move.stage is MoveStage.ENDED:
            course.ends.at_rest(move)
        elif move.stage is MoveStage.RENDEZVOUS:
            course.resume(move)
        else:
            course.moved(move)

    def _count(self, move: Move, event: PostingEnded) -> None:
        """Counts the bytes of a posting that our ranks moved."""
        move.moved(event)
        if move.operation is Operation.READ:
            self._state.moves.bytes_received += event.nbytes
        else:
            self._state.moves.bytes_sent += event.nbytes

    def _lost(self, move: Move, event: PostingEnded) -> None:
        """Keeps a posting's blocks in quarantine: it ended without proof that it is at rest."""
        move.unproved.add(event.posting_id)
        if move.unproved == move.postings:
            self._state.moves.turns.ended(move.name)
        if move.stage is not MoveStage.ENDED:
            self._broke(move, event)

    def _broke(self, move: Move, event: PostingEnded) -> None:
        rank = rank_of(event.posting_id)
        self.course(move).ends.fail_with(move, Reason.DATA_PATH_FAILED, event.message, rank=rank)

    def _fail_all(self, peer: Peer, reason: Reason, message: str, *, dead: bool = False) -> None:
        for move in self._state.moves.of_peer(peer.key):
            if move.stage is not MoveStage.ENDED and not (dead and _outlives(move, peer)):
                self.course(move).ends.fail_with(move, reason, message)


def _outlives(move: Move, peer: Peer) -> bool:
    return type(move) is ReservationMove and move.outlives(peer)
