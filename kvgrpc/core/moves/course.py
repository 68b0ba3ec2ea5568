"""The course that all moves share: reach the peer, open, post, compare, settle.

`moves` takes each step when an event allows it; every wait has a deadline. Each kind of move has a course and ends of
its own, in `receive` and `send`.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from kvgrpc.core.actions import ComputeChecksums, Operation, Post, SendChecksums, SendOpen, SendSettle
from kvgrpc.core.events import Opened
from kvgrpc.core.moves.ends import Ends
from kvgrpc.core.peers.handshakes import Handshakes
from kvgrpc.core.peers.liveness import PeerLiveness
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.checksum_comparison import ChecksumComparison
from kvgrpc.core.state.move import Move, MovedBytes, MoveStage, posting_name
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.tables.peers import Peer
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.tables.transfers import Phase, State, TransferPath
from kvgrpc.core.values.bridge import Bridge, repacked_at_once
from kvgrpc.core.values.chunks import Chunk, Size
from kvgrpc.core.values.pieces import Pieces, pieces_of
from kvgrpc.core.values.plans import PairRuns
from kvgrpc.core.values.slices import RUNS_MAX, RoundSlice, batches, bytes_by_rank, slices_of, split
from kvgrpc.errors import KVGrpcError, Reason

ANSWER_BYTES = 64 * 1024
"""Maximum bytes of checksums in one answer, over all ranks: a source plans these in a few milliseconds."""
ASK_BYTES_PER_S = 50e9
ASK_DELAY_MAX_S = 0.005
"""Delay before the source is asked for checksums: `nbytes / ASK_BYTES_PER_S`, about 10 % of the expected transfer time,
at most 5 ms. The bytes go first: the rank that starts them may share an interpreter with the lead.
"""

RE_PACKED_ON_DEVICE = (
    "these blocks, whose layouts differ, are re-packed by their destination, and no rank re-packs in the memory of a "
    "device, which that is: start both engines with one layout, or give its ranks mirrors"
)

M = TypeVar("M", bound=Move)


class Course(ABC, Generic[M]):
    """Takes the moves of one kind from their start to their end."""

    ends: Ends[M]

    def __init__(self, state: NodeState, handshakes: Handshakes, liveness: PeerLiveness) -> None:
        self._state = state
        self._handshakes = handshakes
        self._liveness = liveness
        self.retries: dict[Timer, Callable[[M], None]] = {
            Timer.OPEN_RETRY: self.send_open,
            Timer.SETTLE_RETRY: self.send_settle,
            Timer.CHECKSUMS_ASK: self.ask_checksums,
        }
        """Calls that a due deadline sends, or sends again."""

    def connect(self, move: M, connection: str = "") -> None:
        """Finds the peer's lead; the move goes on now, or when the lead is reached. `connection`: the caller's."""
        self._state.moves.await_address(move)
        peer = self._want(move, connection)
        if peer is not None:
            self.meet(move, peer)

    def meet(self, move: M, peer: Peer) -> None:
        """Continues a move whose peer is connected, unless its bytes could not be put in place here. A push's
        destination refuses by itself.
        """
        if move.operation is Operation.READ and self._state.peers.on_device and peer.bridges.incoming.repacked:
            self.ends.fail_with(move, Reason.INCOMPATIBLE_POOLS, RE_PACKED_ON_DEVICE)
        else:
            self.reached(move, peer)

    @abstractmethod
    def reached(self, move: M, peer: Peer) -> None:
        """Continues a move whose peer is connected."""

    def reconnect(self, move: M) -> None:
        """Shakes hands again with a peer that does not know us, then asks for the same access again."""
        state = self._state
        state.timers.clear(Timer.OPEN_RETRY, move.name)
        move.move(MoveStage.CONNECTING)
        self._liveness.forget(move.peer)
        state.change(move.transfer_id, phases=self._phase(move, "handshake"), waiting_for="handshake")
        self.connect(move)

    def open(self, move: M, peer: Peer) -> None:
        state = self._state
        move.move(MoveStage.OPENING)
        self._state.moves.bind(move, peer.key)
        state.change(
            move.transfer_id,
            phases=self._phase(move, "open"),
            waiting_for="access",
            peer_incarnation=peer.description.incarnation,
            paths=tuple([TransferPath(peer.paths[pair]) for pair in sorted(peer.paths)]),
        )
        self.send_open(move)

    def send_open(self, move: M) -> None:
        move.asked_of = move.peer
        peer = self._state.peers.lives[move.peer]
        request_id = self._state.transfers.current[move.transfer_id].request_id
        paths = tuple([peer.paths[pair].data_path for pair in sorted(peer.paths)])
        self._state.emit(SendOpen(move.peer, self._opening(move, request_id, paths), move.trace))

    def opened(self, move: M, opened: Opened) -> None:
        """Takes the peer's answer to OpenAccess. Fails the move if the answer makes no sense."""
        state = self._state
        state.timers.clear(Timer.OPEN_RETRY, move.name)
        peer = state.peers.lives[move.peer]
        whose = "source" if move.operation is Operation.READ else "destination"
        if wrong := self._wrong(move, peer, opened):
            self.ends.fail_with(move, Reason.PEER_FAILED, f"the {whose}'s answer makes no sense: {wrong}")
        elif opened.memory_generation != peer.description.memory_generation:
            self._liveness.forget(move.peer)
            message = f"the {whose} registered its memory again since the handshake"
            self.ends.fail_with(move, Reason.MEMORY_CHANGED, message)
        else:
            move.opened = opened
            move.move(MoveStage.OPEN)
            self._accept(move, peer, opened)
            self.try_post(move)

    @abstractmethod
    def try_post(self, move: M) -> None:
        """Moves the bytes once everything that they need is known."""

    def take_turn(self, move: M) -> None:
        """Moves bytes: the move has its turn."""
        if move.stage is MoveStage.WIRE:
            self.moved(move)
        else:
            self.try_post(move)

    def moved(self, move: M) -> None:
        """Continues after all posted bytes have moved: posts the next slice, or compares or settles after the last."""
        if move.left is None:
            self._compare_or_settle(move)
        elif not self._state.peers.lives[move.peer].reachable:
            self._state.moves.await_mapping(move)
            self._want(move)
        elif self._state.moves.turns.take(move.name, self._state.transfers.current[move.transfer_id].priority):
            self._post_slice(move)

    def ask_checksums(self, move: M) -> None:
        """Asks the source for the next checksums of the round while its bytes move."""
        comparison = move.comparison
        assert comparison is not None
        number = len(comparison.there)
        self._state.emit(
            SendChecksums(move.peer, move.access_id, comparison.name, number, comparison.asked, move.trace)
        )

    def compare(self, move: M) -> None:
        """Settles once the checksums of both sides are there. A difference is kept as `mismatch`."""
        comparison = move.comparison
        assert comparison is not None
        if move.left is not None or move.busy or not comparison.complete:
            return
        if comparison.error:
            self.ends.fail_with(move, Reason.DATA_PATH_FAILED, f"no checksums here: {comparison.error}")
        elif not comparison.fits:
            self.ends.fail_with(
                move, Reason.PEER_FAILED, "the source sent checksums of other blocks than it was asked for"
            )
        else:
            move.mismatch = comparison.difference(self._state.life.engine.pool)
            self.settle(move)

    def _compare_or_settle(self, move: M) -> None:
        comparison = move.comparison
        if comparison is None:
            self.settle(move)
            return
        self._state.change(move.transfer_id, waiting_for="checksums", phases=self._phase(move, "checksum"))
        self.compare(move)

    def settle(self, move: M) -> None:
        """Asks the peer whether its side held."""
        state = self._state
        move.comparison = None
        move.move(MoveStage.SETTLING)
        state.timers.clear_some((Timer.QUEUE, Timer.TRANSFER, Timer.CHECKSUMS_ASK), move.name)
        state.timers.set(Timer.SETTLE, move.name, state.now + state.limits.settle_timeout_s)
        phases, nbytes = self._phase(move, "settle"), move.nbytes
        state.change(move.transfer_id, state=State.ACTIVE, waiting_for="settle", nbytes_done=nbytes, phases=phases)
        self.send_settle(move)

    def send_settle(self, move: M) -> None:
        settling = move.settling()
        if move.mismatch:  # this consumer did not get the KV
            settling = replace(settling, last=False)
        self._state.emit(SendSettle(move.peer, settling, move.trace))

    @abstractmethod
    def settled(self, move: M) -> None:
        """Continues or ends the move: the peer's side held throughout the round."""

    def stale(self, move: M, reason: Reason, message: str) -> None:
        """Fails the move: the peer's side did not hold throughout the round."""
        self.ends.fail_with(move, reason, message, closed=move.last_round and not move.mismatch)

    def resume(self, move: M) -> None:
        """Continues after the last posting of replaced parts ended; only a source replaces parts."""

    @abstractmethod
    def _opening(self, move: M, request_id: str, paths: tuple[str, ...]) -> AccessOpening:
        """Returns the row of OpenAccess for this move."""

    @abstractmethod
    def _wrong(self, move: M, peer: Peer, opened: Opened) -> str:
        """Returns the error in the peer's answer, as text; empty if there is none."""

    @abstractmethod
    def _accept(self, move: M, peer: Peer, opened: Opened) -> None:
        """Takes the peer's good answer; the move is OPEN."""

    def _next_round(self, move: M) -> None:
        """Begins the next round: the parts of this one are settled, and more parts are there or will come."""
        move.rounds += 1
        move.settled_bytes = move.nbytes
        move.move(MoveStage.OPEN)
        self._state.timers.clear_some((Timer.SETTLE, Timer.SETTLE_RETRY), move.name)
        self._state.change(move.transfer_id, waiting_for="parts")

    def _want(self, move: M, connection: str = "") -> Peer | None:
        """Returns the peer's lead, or None: it is being reached, or it cannot be and the move has failed."""
        claims = move.claims
        try:
            return self._handshakes.want(claims.address, claims.engine_id, claims.incarnation, move.trace, connection)
        except KVGrpcError as error:
            self.ends.fail(move, error)
            return None

    def _post_when_ready(self, move: M) -> None:
        """Posts the move, or makes it wait for the engine's step, the peer's mapping or its turn."""
        state = self._state
        if move.after_step > state.pool.steps.done():
            self._state.moves.await_step(move)
            self._wait_for(move, "step")
        elif not state.peers.lives[move.peer].reachable:
            self._state.moves.await_mapping(move)
            self._wait_for(move, "handshake")
            self._want(move)
        elif state.moves.turns.take(move.name, state.transfers.current[move.transfer_id].priority):
            self._post(move)
        else:
            self._wait_for(move, "turn")
            self._begin_clock(move)

    def _begin_clock(self, move: M) -> None:
        """Starts the transfer timeout of parts that both sides know. A waiting pull has its queue timeout instead."""
        timers = self._state.timers
        if move.counts_waiting and timers.when(Timer.TRANSFER, move.name) is None:
            nbytes = self._bridge(move).size_of(move.chunks(self._bridge(move))).nbytes
            timers.set(Timer.TRANSFER, move.name, self._state.now + move.bytes_timeout_s(nbytes, self._state.limits))

    def _wait_for(self, move: M, what: str) -> None:
        if self._state.transfers.current[move.transfer_id].waiting_for != what:
            self._state.change(move.transfer_id, waiting_for=what)

    def _post(self, move: M) -> None:
        state = self._state
        bridge = self._bridge(move)
        chunks, move.mismatch = move.chunks(bridge), ""
        size = bridge.size_of(chunks)
        move.begin_round()
        if not size.nbytes:
            self.settle(move)
            return
        move.move(MoveStage.WIRE)
        move.planned += bridge.bytes_of(chunks)
        move.left = self._slices(move, bridge, chunks, size)
        self._plan(move, bridge)
        state.timers.clear_some((Timer.QUEUE, Timer.REGISTRATION), move.name)
        state.timers.set(Timer.TRANSFER, move.name, state.now + move.bytes_timeout_s(size.nbytes, state.limits))
        state.change(
            move.transfer_id,
            state=State.ACTIVE,
            waiting_for="",
            phases=self._phase(move, "wire"),
            blocks=move.block_count,
            nbytes=max(move.expected, move.planned),
            paths=self._paths(move),
        )
        self._post_slice(move)
        if move.comparison is not None:
            delay_s = min(size.nbytes / ASK_BYTES_PER_S, ASK_DELAY_MAX_S)
            state.timers.set(Timer.CHECKSUMS_ASK, move.name, state.now + delay_s)

    def _slices(self, move: M, bridge: Bridge, chunks: list[Chunk], size: Size) -> list[RoundSlice]:
        """Returns the slices of a round: each fits a frame, a staging buffer and an answer with checksums."""
        state = self._state
        staged = bridge.stages(chunks)
        repacked = repacked_at_once(state.peers.lives[move.peer].data_paths) if staged else sys.maxsize
        most = Size(min(state.limits.in_flight_bytes, repacked), size.blocks, RUNS_MAX)
        if state.moves.checksums and move.operation is Operation.READ:
            blocks = min(state.limits.blocks_per_request, max(ANSWER_BYTES // (4 * state.life.engine.world_size), 1))
            most = most._replace(blocks=blocks)
            parts = slices_of(chunks, bridge, most)
            asked = most._replace(nbytes=sys.maxsize)  # bytes do not limit what one call asks for
            move.comparison = ChecksumComparison(f"m{move.name}/{move.rounds}", batches(parts, bridge, asked))
        elif staged or size.runs > RUNS_MAX:
            parts = slices_of(chunks, bridge, most)
        else:
            return [RoundSlice((), chunks)]
        return [RoundSlice((), some) for some in batches(parts, bridge, most)]

    def _plan(self, move: M, bridge: Bridge) -> tuple[PairRuns, ...]:
        """Plans the next slice only, so that a long move does not hold up others."""
        assert move.left is not None
        first = move.left[0]
        planned = tuple(bridge.plan(first.parts))
        move.left[0] = replace(first, planned=planned)
        for some in planned:
            before = move.by_pair.get(some.pair, MovedBytes())
            move.by_pair[some.pair] = MovedBytes(before.nbytes + some.total_bytes, before.descriptors + len(some.runs))
        return planned

    def _paths(self, move: M) -> tuple[TransferPath, ...]:
        """Returns the data paths, with the bytes that have moved or are about to move over each."""
        paths, reads = self._state.peers.lives[move.peer].paths, move.operation is Operation.READ
        rows = {pair if reads else pair.turned: moved for pair, moved in move.by_pair.items()}
        return tuple([TransferPath(paths[pair], *rows[pair]) for pair in sorted(rows)])

    def _post_slice(self, move: M) -> None:
        """Posts as many bytes as may be in flight at once; the rest needs another turn."""
        state = self._state
        assert move.left is not None
        planned = move.left[0].planned
        if not planned:
            planned = self._plan(move, self._bridge(move))
            state.change(move.transfer_id, paths=self._paths(move))
        first = move.left.pop(0)
        now, later = split(planned, state.limits.in_flight_bytes)
        if later:
            move.left.insert(0, replace(first, planned=later))
        name, pieces = "", None
        if not later and move.comparison is not None:
            name, pieces = self._checksums_of(move, first.parts)
        move.left = move.left or None
        state.moves.turns.began(move.name, max(bytes_by_rank(now).values()))
        move.posted_at = state.now
        for some in now:
            rank, peer_rank = some.pair if move.operation is Operation.READ else some.pair.turned
            posting_id = posting_name(move.name, rank, peer_rank)
            state.moves.posted(move, posting_id)
            checksums = None if pieces is None else ComputeChecksums(rank, name, pieces)
            of = move.transfer_id, move.operation, move.fills, checksums
            state.emit(Post(rank, posting_id, move.peer, some.runs, *of, peer_rank, some.repack))

    def _checksums_of(self, move: M, parts: Sequence[Chunk]) -> tuple[str, Pieces]:
        """Returns a name and the pieces whose checksums all ranks compute as these parts arrive."""
        assert move.comparison is not None
        engine = self._state.life.engine
        name = move.comparison.expect(range(engine.world_size))
        return name, pieces_of(engine.pool, [(part.destination, part.layers) for part in parts])

    def _bridge(self, move: M) -> Bridge:
        """Returns the bridge from the pool where the bytes come from to the pool where they go."""
        both = self._state.peers.lives[move.peer].bridges
        return both.incoming if move.operation is Operation.READ else both.outgoing

    def _phase(self, move: M, name: str) -> tuple[Phase, ...]:
        """Returns the phases with `name` begun. Only the first round of a transfer's first move adds phases."""
        transfer = self._state.transfers.current[move.transfer_id]
        if move.rounds or not move.leading:
            return transfer.phases
        return transfer.phases_at(self._state.now, name)
