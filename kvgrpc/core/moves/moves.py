"""What pulls and pushes hear: peers that come and go, answers to their calls, the ends of their postings."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Generic, TypeVar

from kvgrpc.core.actions import Operation
from kvgrpc.core.events import (
    AccessAnswered,
    ChecksumsAnswered,
    ChecksumsComputed,
    Opened,
    PostingEnded,
    SettleAnswered,
)
from kvgrpc.core.moves.course import Course, Ends
from kvgrpc.core.moves.failures import TIMEOUTS
from kvgrpc.core.moves.move import AT_ISSUER, Move, MoveTable, Stage, rank_of
from kvgrpc.core.peers.liveness import PeerLiveness
from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.accesses import Verdict
from kvgrpc.core.tables.peers import Peer
from kvgrpc.core.tables.timers import Timer
from kvgrpc.errors import KVGrpcError, Reason

RETRY_DELAY_S = 0.2
"""Between two tries of a call to a peer that did not answer; short against every timeout that bounds the tries."""

M = TypeVar("M", bound=Move)


class Moves(ABC, Generic[M]):
    """All moves of one kind."""

    def __init__(
        self, state: NodeState, lives: PeerLiveness, table: MoveTable[M], steps: Course[M], ends: Ends[M]
    ) -> None:
        self._state = state
        self._lives = lives
        self._table = table
        self._steps = steps
        self._ends = ends

    # -- peers

    def peer_ready(self, address: str, peer: Peer) -> None:
        """The lead at an address is connected: moves that wait for it go on."""
        found = peer.description.engine_id
        for move in [*self._table.take_address(address), *self._table.take_unmapped(address)]:
            if move.claims.engine_id not in ("", found):
                message = f"engine {found} answers at {address}, {move.claims.engine_id} was expected"
                self._ends.fail_with(move, Reason.WRONG_ENGINE, message)
            elif move.stage in AT_ISSUER:
                self._steps.take_turn(move)
            else:
                self._steps.reached(move, peer)

    def peer_failed(self, address: str, error: KVGrpcError, expected: str | None, lead: Peer | None) -> None:  # noqa: ARG002
        """The lead at an address cannot be used; where `expected` is stated, only by those who expect that engine.

        `lead`: it answered, but no data path reaches its memory.
        """
        for move in [*self._table.take_address(address), *self._table.take_unmapped(address)]:
            if expected in (None, move.claims.engine_id):
                self._ends.fail(move, error)
            elif move.stage in AT_ISSUER:
                self._steps.take_turn(move)
            else:
                self._steps.connect(move)

    def peer_dead(self, peer: Peer) -> None:
        """Moves with a dead life of a peer fail."""
        self._fail_all(peer, Reason.PEER_LOST, f"engine {peer.description.engine_id} was taken for dead")

    def memory_changed(self, peer: Peer) -> None:
        """Moves with memory that was registered anew fail."""
        self._fail_all(peer, Reason.MEMORY_CHANGED, f"engine {peer.description.engine_id} registered its memory anew")

    def memory_changes(self) -> None:
        """This engine's own memory is about to be registered anew: what has an access fails."""
        for move in self._table:
            if move.stage in (Stage.OPENING, *AT_ISSUER):
                self._ends.fail_with(move, Reason.MEMORY_CHANGED, "this engine registers its memory anew")

    def at_somebodys_word(self, transfer_ids: Collection[str]) -> None:
        """Nothing accesses the blocks of these ended transfers any more, or of all: somebody says so."""
        for move in self._table:
            if move.stage is Stage.ENDED and move.busy and (not transfer_ids or move.transfer_id in transfer_ids):
                move.outlived |= bool(move.postings)  # the word is about this engine's memory only
                for posting_id in list(move.postings):
                    self._table.take_posting(posting_id)
                self._trust(move)
                self._ends.at_rest(move)

    def access_answered(self, event: AccessAnswered) -> None:
        """The peer answered OpenAccess."""
        move = self._table.of_access(event.access_id)
        if move is None or move.stage is not Stage.OPENING:
            return
        if isinstance(event.result, Opened):
            self._opened(move, event.result)
        elif event.result.reason is Reason.NO_HANDSHAKE:
            self._steps.reconnect(move)
        elif event.retryable:
            self._state.timers.set(Timer.OPEN_RETRY, move.name, self._state.now + RETRY_DELAY_S)
        else:
            self._ends.fail(move, event.result)

    def settle_answered(self, event: SettleAnswered) -> None:
        """The peer gave its verdict."""
        move = self._table.of_access(event.access_id)
        if move is None or move.stage is not Stage.SETTLING:
            return
        result = event.result
        if isinstance(result, Verdict):
            if result.valid and move.mismatch:
                self._ends.fail_with(move, Reason.CHECKSUM_MISMATCH, move.mismatch)
            elif result.valid:
                self._steps.settled(move)
            else:
                self._stale(move, result.reason or Reason.PEER_FAILED, result.message)
        elif result.reason is Reason.NO_HANDSHAKE:
            self._lives.forget(move.peer)
            message = "the peer restarted, or took this engine for dead, before it settled"
            # Whoever does not know us has none of our reads; what we wrote there is proved at rest by the closing only.
            closed = self._steps.operation is Operation.READ
            self._ends.fail_with(move, Reason.INCARNATION_CHANGED, message, closed=closed)
        elif event.retryable:
            self._state.timers.set(Timer.SETTLE_RETRY, move.name, self._state.now + RETRY_DELAY_S)
        else:
            self._ends.fail(move, result)

    # -- ranks

    def posting_ended(self, event: PostingEnded) -> None:
        """A posting is over. The last one of a finished transfer proves its blocks to be at rest."""
        writes = self._steps.operation is Operation.WRITE
        if not event.quiesced and not (event.own_at_rest and writes):
            self._lost(event)
            return
        move = self._table.take_posting(event.posting_id)
        if move is None:
            return
        move.outlived |= not event.quiesced
        if event.done:
            move.nbytes += event.nbytes
            self._account(event.nbytes)
        # Parts that were replaced need not arrive, but the next ones must not race them.
        needed = move.stage is not Stage.RENDEZVOUS or not event.quiesced
        if not event.done and needed and move.stage is not Stage.ENDED:
            self._broke(move, event)
            self._lives.map_anew(move.peer)
        elif not move.postings:
            self._state.turns.ended(move.name)
            self._at_rest(move)

    def _at_rest(self, move: M) -> None:
        """Nothing of it is in flight any more."""
        if move.stage is Stage.ENDED:
            self._ends.at_rest(move)
        elif move.stage is Stage.RENDEZVOUS:
            self._steps.resume(move)
        else:
            self._steps.moved(move)

    def checksums_answered(self, event: ChecksumsAnswered) -> None:
        """The source says what a round should bring."""
        move = self._comparing(event.name)
        if move is None or move.comparing is None or event.number != len(move.comparing.there):
            return
        if not isinstance(event.result, KVGrpcError):
            move.comparing.there.append(event.result)
            if move.comparing.all_there:
                self._steps.compare(move)
            else:
                self._steps.ask_checksums(move)
        elif event.retryable:
            self._state.timers.set(Timer.SUMS_ASK, move.name, self._state.now + RETRY_DELAY_S)
        else:
            self._ends.fail(move, event.result)

    def summed(self, event: ChecksumsComputed) -> None:
        """A rank of ours says what a slice of a round brought."""
        name, _, number = event.name.rpartition(".")
        move = self._comparing(name)
        if move is None or move.comparing is None:
            return
        slices = move.comparing.here
        if not number.isdecimal() or int(number) >= len(slices):
            return
        if slices[int(number)].take(event.rank, event.values, event.message):
            self._steps.compare(move)

    def _comparing(self, name: str) -> M | None:
        """The move that compares the checksums of its round by that name."""
        move = self._table.find(name[1:].rpartition("/")[0])
        if move is None or move.stage is not Stage.WIRE or move.comparing is None or move.comparing.name != name:
            return None
        return move

    def take_turn(self, name: str) -> None:
        """It is the turn of that move, if it is one of these."""
        move = self._table.find(name)
        if move is not None:
            self._steps.take_turn(move)

    def step_done(self) -> None:
        """Moves that waited for the engine's step are tried again."""
        for move in self._table.take_stepping():
            self._steps.try_post(move)

    # -- timers

    def due(self, timer: Timer, name: str) -> None:
        """A deadline of a move."""
        move = self._table.find(name)
        assert move is not None
        if timer is Timer.OPEN_RETRY:
            self._steps.send_open(move)
        elif timer is Timer.SETTLE_RETRY:
            self._steps.send_settle(move)
        elif timer is Timer.SUMS_ASK:
            self._steps.ask_checksums(move)
        else:
            reason, message = TIMEOUTS[timer]
            self._ends.fail_with(move, reason, message.format(phase=move.stage.value))

    # -- for people and checks

    def knows(self, transfer_id: str) -> bool:
        """Whether that transfer is one of these, and not forgotten."""
        return self._table.find(transfer_id) is not None

    def at_peers(self) -> list[M]:
        """Moves that may have an access open at a peer."""
        return [move for move in self._table if move.access_id and move.peer]

    def open_accesses(self, peer: str) -> int:
        """Accesses that this engine has open at that life of a peer."""
        return sum(move.stage in AT_ISSUER for move in self._table.of_peer(peer))

    def oldest_posting(self) -> float | None:
        """When the oldest posting in flight was posted."""
        move = self._table.oldest_in_flight()
        return None if move is None else move.posted_at

    def missing_proof(self, transfer_id: str) -> str:
        """What would prove the blocks of an ended transfer to be at rest; empty when they are, or it is not over."""
        move = self._table.find(transfer_id)
        return move.missing_proof if move is not None and move.stage is Stage.ENDED else ""

    @abstractmethod
    def _opened(self, move: M, opened: Opened) -> None:
        """Of each kind its own."""

    def _trust(self, move: M) -> None:
        """Somebody's word holds for whoever else may write its blocks."""

    @abstractmethod
    def _account(self, nbytes: int) -> None:
        """Bytes that our ranks moved, for people."""

    def _stale(self, move: M, reason: Reason, message: str) -> None:
        """The peer's side did not hold throughout the round."""
        self._ends.fail_with(move, reason, message, closed=move.last_round and not move.mismatch)

    def _lost(self, event: PostingEnded) -> None:
        """A posting of which nobody can say that it is at rest: its blocks stay in quarantine."""
        move = self._table.of_posting(event.posting_id)
        if move is None:
            return
        move.unproved.add(event.posting_id)
        if move.unproved == move.postings:
            self._state.turns.ended(move.name)
        if move.stage is not Stage.ENDED:
            self._broke(move, event)

    def _broke(self, move: M, event: PostingEnded) -> None:
        self._ends.fail_with(move, Reason.DATA_PATH_FAILED, event.message, rank=rank_of(event.posting_id))

    def _fail_all(self, peer: Peer, reason: Reason, message: str) -> None:
        for move in self._table.of_peer(peer.key):
            if move.stage is not Stage.ENDED:
                self._ends.fail_with(move, reason, message)
