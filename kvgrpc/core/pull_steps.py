"""The course of one pull: from its grant to the question whether the bytes are valid.

    connect -> open -> opened -> (blocks, step) -> posted -> settle

Each step is taken once by the events that `pulling` hears; what a pull waits for meanwhile has a deadline.
"""

from kvgrpc.core.accesses import Opening
from kvgrpc.core.actions import Post, PullOpened, SendOpen, SendSettle
from kvgrpc.core.descriptors import plan_runs
from kvgrpc.core.events import Opened, Settling
from kvgrpc.core.lives import Lives
from kvgrpc.core.peering import Peering
from kvgrpc.core.peers import Peer
from kvgrpc.core.pins import Blocks, PinKind
from kvgrpc.core.pull import Pull, Stage, posting_name
from kvgrpc.core.pull_checks import check_opened
from kvgrpc.core.pull_ends import PullEnds
from kvgrpc.core.pull_table import PullTable
from kvgrpc.core.renewing import Renewals
from kvgrpc.core.state import NodeState
from kvgrpc.core.timers import Timer
from kvgrpc.core.transfers import State, TransferPath
from kvgrpc.errors import KVGrpcError, Reason


class PullSteps:
    """What happens to a pull between its making and its end."""

    def __init__(self, state: NodeState, peering: Peering, lives: Lives, pulls: PullTable, ends: PullEnds) -> None:
        self._state = state
        self._peering = peering
        self._lives = lives
        self._pulls = pulls
        self._ends = ends
        self.renewals = Renewals(state, pulls)

    def take(self, pull: Pull, blocks: Blocks, skip: list[int], after_step: int) -> None:
        """The destination's blocks are the transfer's until they are returned."""
        state = self._state
        pull.destination, pull.skip, pull.after_step = blocks, skip, after_step
        if not pull.moves_nothing:
            state.pins.add(pull.transfer_id, PinKind.TARGET, blocks, state.now)

    def connect(self, pull: Pull) -> None:
        """Looks for the source's lead; the pull goes on now, or when the lead is reached."""
        self._pulls.await_address(pull)
        peer = self._want(pull)
        if peer is not None:
            self.open(pull, peer)

    def _want(self, pull: Pull) -> Peer | None:
        """The source's lead, or None while it is being reached, or when the pull has failed because it cannot be."""
        claims = pull.claims
        try:
            return self._peering.want(claims.address, claims.engine_id, claims.incarnation, pull.trace)
        except KVGrpcError as error:
            self._ends.fail(pull, error)
            return None

    def reconnect(self, pull: Pull) -> None:
        """The source does not know us: a new handshake, then the same access again."""
        state = self._state
        state.timers.clear(Timer.OPEN_RETRY, pull.transfer_id)
        pull.move(Stage.CONNECTING)
        self._lives.forget(pull.peer)
        phases = state.transfers.get(pull.transfer_id).phase_started("handshake", state.now)
        state.change(pull.transfer_id, phases=phases, waiting_for="handshake")
        self.connect(pull)

    def open(self, pull: Pull, peer: Peer) -> None:
        state = self._state
        pull.move(Stage.OPENING)
        self._pulls.bind(pull, peer.key)
        transfer = state.transfers.get(pull.transfer_id)
        state.change(
            pull.transfer_id,
            phases=transfer.phase_started("open", state.now),
            waiting_for="access",
            peer_incarnation=peer.description.incarnation,
            paths=tuple(TransferPath(peer.paths[rank]) for rank in sorted(peer.paths)),
        )
        self.send_open(pull)

    def send_open(self, pull: Pull) -> None:
        peer = self._state.peers[pull.peer]
        transfer = self._state.transfers.get(pull.transfer_id)
        paths = tuple(peer.paths[rank].data_path for rank in sorted(peer.paths))
        opening = Opening(pull.access_id, pull.token, pull.claim, pull.transfer_id, transfer.request_id, paths)
        self._state.emit(SendOpen(pull.peer, opening, pull.trace))

    def opened(self, pull: Pull, opened: Opened) -> None:
        state = self._state
        state.timers.clear(Timer.OPEN_RETRY, pull.transfer_id)
        peer = state.peers[pull.peer]
        wrong = check_opened(peer.description, pull, opened)
        if wrong:
            self._ends.fail_with(pull, Reason.PEER_FAILED, f"the source's answer makes no sense: {wrong}")
            return
        if opened.memory_generation != peer.description.memory_generation:
            self._lives.forget(pull.peer)
            message = "the source registered its memory anew since the handshake"
            self._ends.fail_with(pull, Reason.MEMORY_CHANGED, message)
            return
        pull.opened = opened
        pull.move(Stage.OPEN)
        transfer = state.change(
            pull.transfer_id,
            phases=state.transfers.get(pull.transfer_id).phase_started("queue", state.now),
            waiting_for="blocks" if pull.destination is None else "step",
            peer_transfer_id=opened.transfer_id,
        )
        state.tell(transfer.owner, PullOpened(transfer.id, transfer.request_id, pull.claim.tokens))
        if pull.destination is None:
            state.timers.clear(Timer.QUEUE, pull.transfer_id)
            state.timers.set(Timer.BLOCKS, pull.transfer_id, transfer.created + state.limits.lease_cap_s)
        self.renewals.start(pull)
        self.try_post(pull)

    def try_post(self, pull: Pull) -> None:
        """Moves the bytes once source, destination and step are known."""
        state = self._state
        if pull.stage is not Stage.OPEN or pull.destination is None:
            return
        if pull.moves_nothing:
            self.settle(pull)
        elif pull.after_step > state.step_done():
            self._pulls.await_step(pull)
            self._wait_for(pull, "step")
        elif not state.peers[pull.peer].reachable:
            self._pulls.await_mapping(pull)
            self._wait_for(pull, "handshake")
            self._want(pull)
        else:
            self._post(pull)

    def _wait_for(self, pull: Pull, what: str) -> None:
        if self._state.transfers.get(pull.transfer_id).waiting_for != what:
            self._state.change(pull.transfer_id, waiting_for=what)

    def _post(self, pull: Pull) -> None:
        state = self._state
        assert pull.opened is not None
        assert pull.destination is not None
        source = [ids[skip:] for (_, ids), skip in zip(pull.opened.blocks, pull.skip, strict=True)]
        peer = state.peers[pull.peer]
        runs = plan_runs(peer.description.pool, state.pool.pool, source, pull.destination)
        pull.move(Stage.WIRE)
        pull.posted_at = state.now
        state.timers.clear(Timer.QUEUE, pull.transfer_id)
        state.timers.set(Timer.TRANSFER, pull.transfer_id, state.now + pull.transfer_timeout_s)
        ranks = range(state.pool.world_size)
        state.change(
            pull.transfer_id,
            state=State.ACTIVE,
            waiting_for="",
            phases=state.transfers.get(pull.transfer_id).phase_started("wire", state.now),
            blocks=sum(len(ids) for ids in pull.destination),
            nbytes=runs.total_bytes * len(ranks),
            paths=tuple(TransferPath(peer.paths[r], runs.total_bytes, len(runs)) for r in ranks),
        )
        for rank in ranks:
            posting_id = posting_name(pull.transfer_id, rank)
            self._pulls.posted(pull, posting_id)
            state.emit(Post(rank, posting_id, pull.peer, runs, pull.transfer_id))

    def settle(self, pull: Pull) -> None:
        state = self._state
        pull.move(Stage.SETTLING)
        for timer in (Timer.QUEUE, Timer.TRANSFER):
            state.timers.clear(timer, pull.transfer_id)
        state.timers.set(Timer.SETTLE, pull.transfer_id, state.now + state.limits.settle_timeout_s)
        state.change(
            pull.transfer_id,
            state=State.ACTIVE,
            waiting_for="settle",
            nbytes_done=pull.nbytes,
            phases=state.transfers.get(pull.transfer_id).phase_started("settle", state.now),
        )
        self.send_settle(pull)

    def send_settle(self, pull: Pull) -> None:
        settling = Settling(pull.access_id, last=True, nbytes=pull.nbytes)
        self._state.emit(SendSettle(pull.peer, settling, pull.trace))
