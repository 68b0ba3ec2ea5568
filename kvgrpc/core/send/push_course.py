"""The course of one registration of a push, at the source.

    (parts, registration) -> connect -> open -> opened -> posted -> settle      where this side moves the bytes
                                                opened -> told                  where the destination does, and settles

The steps shared with a pull are in `moves.course`. Ends are in `push_ends`.
"""

from kvgrpc.core.actions import SendParts
from kvgrpc.core.events import Opened, PartsAnswered
from kvgrpc.core.moves.course import Course
from kvgrpc.core.moves.moves import RETRY_DELAY_S
from kvgrpc.core.peers.handshakes import Handshakes
from kvgrpc.core.peers.liveness import PeerLiveness
from kvgrpc.core.send.leases import Leases
from kvgrpc.core.send.push_ends import PushEnds
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.move import MoveStage
from kvgrpc.core.state.push import Registration
from kvgrpc.core.tables.accesses import Access, AccessOpening, AccessState
from kvgrpc.core.tables.peers import Peer
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.tables.transfers import State
from kvgrpc.core.values.block_ids import no_blocks, wrong_lists
from kvgrpc.core.values.compatibility import READS_PUSHES
from kvgrpc.core.values.groups import check_prefix
from kvgrpc.core.values.ids import next_access_ids
from kvgrpc.core.values.parts import Progress
from kvgrpc.errors import OutOfRange, Reason


class PushCourse(Course[Registration]):
    """The steps of a registration between its making and its end."""

    def __init__(
        self, state: NodeState, handshakes: Handshakes, liveness: PeerLiveness, ends: PushEnds, leases: Leases
    ) -> None:
        super().__init__(state, handshakes, liveness)
        self.ends: PushEnds = ends
        self._leases = leases
        self.retries[Timer.PARTS_RETRY] = self.tell

    def reached(self, move: Registration, peer: Peer) -> None:
        """Handles the connection to the destination's lead: opens the access once there is a part and no earlier
        posting is in flight.
        """
        if move.push.parts is None or move.postings:
            self._state.moves.bind(move, peer.key)
        else:
            self.open(move, peer)

    def resume(self, move: Registration) -> None:
        self._state.pool.pins.drop(move.name, PinKind.ACCESS)
        self.ends.return_parts(move.push)
        if move.push.parts is not None:
            self.connect(move)

    def open(self, move: Registration, peer: Peer) -> None:
        # Only the destination can put re-packed bytes in place.
        reads = READS_PUSHES in peer.description.features or peer.bridges.outgoing.repacked
        move.writes = peer.data_paths <= self._state.moves.writers and not reads
        if move.replaced:
            access_id, reverse_id = next_access_ids(self._state.life.secret, move.reverse_id)
            self._state.send.pushes.take_ids(move, access_id, reverse_id)
            self._state.moves.index_access(move, access_id)
            move.replaced = False
        if not move.writes and move.reverse_id not in self._state.access.rows:
            self._let_read(move, peer)
            self._ready(move, move.told)
            if move.ready:
                self._widen(move)
        super().open(move, peer)

    def try_post(self, move: Registration) -> None:
        """Posts the ready parts, or tells the destination of them."""
        if move.stage is not MoveStage.OPEN:
            return
        done = move.posted if move.writes else move.told
        late = self._ready(move, done)
        if late and move.ready == done:
            self._wait_for(move, "step")
        if move.ready == done:
            return
        if move.writes:
            self._extend(move)
            self._post_when_ready(move)
        elif self._state.access.rows[move.reverse_id].state is not AccessState.OPEN:
            # The access was opened before the memory was registered again, so reads under it are not valid.
            self.ends.fail_with(move, Reason.MEMORY_CHANGED, "this engine registered its memory again")
        elif not move.telling:
            self._widen(move)
            self._state.change(move.transfer_id, waiting_for="")
            self.tell(move)

    def parts_answered(self, event: PartsAnswered) -> None:
        """Takes the destination's answer to SendParts, or the error."""
        move = self._state.send.pushes.of_access(event.access_id)
        if move is None or move.stage is not MoveStage.OPEN or not move.telling:
            return
        if event.error is None:
            move.told, move.telling = move.telling, 0
            self.try_post(move)
        elif event.retryable:
            self._state.timers.set(Timer.PARTS_RETRY, move.name, self._state.now + RETRY_DELAY_S)
        else:
            self.ends.fail(move, event.error)

    def tell(self, move: Registration) -> None:
        """Sends the ready parts to the destination, also as a retry."""
        self._state.emit(SendParts(move.peer, move.access_id, move.rows(), move.trace))

    def settled(self, move: Registration) -> None:
        """Handles a valid settle: the destination's target held throughout the round."""
        state, push = self._state, move.push
        lease = state.send.leases.get(push.lease_id)
        lease.nbytes_done += move.nbytes - move.settled_bytes
        if move.last_round:
            if (telemetry := move.telemetry) is not None:
                lease.telemetries += (telemetry,)
            push.received.add(move.claims.engine_id)
            push.finished.add(move.claims.engine_id)
            self.ends.done(move)
            self._leases.count(lease)
            return
        self._next_round(move)
        self.try_post(move)

    def _wrong(self, move: Registration, peer: Peer, opened: Opened) -> str:
        assert move.push.content is not None
        offered = move.push.content.tokens
        if not 0 < opened.token_count <= offered:
            return f"it takes {opened.token_count} of {offered} tokens"
        try:
            check_prefix(self._state.life.engine.pool.groups, offered, opened.token_count)
        except OutOfRange as error:
            return error.message
        return wrong_lists(peer.description.pool, opened.blocks, opened.token_count, exact=False)

    def _accept(self, move: Registration, peer: Peer, opened: Opened) -> None:
        """Handles the answer to OpenAccess, which names the blocks to fill."""
        move.told, move.telling = move.telling, 0
        if not move.writes:
            self._reads_by(move, peer, opened.data_paths)
        move.progress = Progress(self._state.life.engine.pool, opened.token_count)
        self._state.moves.weigh(move)
        self._state.change(
            move.transfer_id,
            state=State.ACTIVE,
            phases=self._phase(move, "queue"),
            waiting_for="parts",
            peer_engine_id=peer.description.engine_id,
            peer_incarnation=peer.description.incarnation,
            peer_address=peer.description.address,
            peer_transfer_id=opened.transfer_id,
        )

    def _post(self, move: Registration) -> None:
        move.posted_epoch = move.push.part_epoch
        self._state.pool.pins.extend(move.name, PinKind.ACCESS, move.parts.listed(move.fresh), self._state.now)
        super()._post(move)

    def _ready(self, move: Registration, done: int) -> bool:
        """Counts the parts that the engine's steps have written and, where there are mirrors, that are copied. `done`
        of them were moved or told before. Returns whether some are late. Looks at one batch only, which is what one
        round moves or one call tells.
        """
        state = self._state
        fresh, uncopied = move.parts.batch(done), state.send.leases.get(move.push.lease_id).uncopied
        misses = (part.number in uncopied or part.after_step > state.pool.steps.done(part.layers) for part in fresh)
        late = next((i for i, missing in enumerate(misses) if missing), len(fresh))
        move.ready = done + late
        if late < len(fresh):
            self._state.moves.await_step(move)
        return late < len(fresh)

    def _widen(self, move: Registration) -> None:
        """Lets the destination read the parts that are ready and that it is about to be told of."""
        move.telling = move.ready
        access = self._state.access.rows[move.reverse_id]
        listed = move.parts.listed(move.parts.between(move.told, move.ready))
        self._state.pool.pins.extend(access.owner, PinKind.ACCESS, listed, self._state.now)
        self._state.access.weigh(access)
        self._extend(move)

    def _extend(self, move: Registration) -> None:
        """Extends the lease by the time that the bytes of its blocks may take, and the settle timeout."""
        state = self._state
        lease = state.send.leases.get(move.push.lease_id)
        nbytes = state.pool.bytes_of([len(ids) for ids in lease.blocks])
        self._leases.extend(lease, move.bytes_timeout_s(nbytes, state.limits) + state.limits.settle_timeout_s)

    def _let_read(self, move: Registration, peer: Peer) -> None:
        """Opens a READ access on our own lease for the destination."""
        state = self._state
        lease = state.send.leases.get(move.push.lease_id)
        opening = AccessOpening(move.reverse_id, b"", None, data_paths=peer.reads_by)
        access = Access(opening, peer.description.engine_id, peer.key, lease.id, state.now)
        access.move(AccessState.OPEN)
        state.access.add(peer, access)
        lease.opened(access.id, access.consumer)
        nothing = no_blocks(len(lease.blocks))
        state.pool.pins.add(access.owner, PinKind.ACCESS, nothing, state.now)
        state.access.weigh(access)
        state.expect(access, open_=True)

    def _reads_by(self, move: Registration, peer: Peer, data_paths: tuple[str, ...]) -> None:
        """Takes the destination's word on how it reads. Ranks need no turns for most data paths, and a turn takes their
        engine's processor and its interpreter.
        """
        state, peer.reads_by = self._state, data_paths
        state.read_by(state.access.rows[move.reverse_id], data_paths)

    def _opening(self, move: Registration, request_id: str, paths: tuple[str, ...]) -> AccessOpening:
        reverse = b"" if move.writes else move.reverse_id
        return AccessOpening(
            move.access_id, move.token, None, move.transfer_id, request_id, paths, reverse, move.push.content,
            move.push.part_epoch, () if move.writes else move.rows(),
        )  # fmt: skip
