"""The course of one pull: from its grant to the question whether the bytes are valid.

    connect -> open -> opened -> (blocks, step) -> posted -> settle

What it has in common with a push is in `move_steps`.
"""

from kvgrpc.core.actions import LayersReceived, Operation, PullOpened, SendRegister
from kvgrpc.core.events import Opened
from kvgrpc.core.moves.course import Course
from kvgrpc.core.moves.move import MoveTable, Stage
from kvgrpc.core.peers.handshakes import Handshakes
from kvgrpc.core.peers.liveness import PeerLiveness
from kvgrpc.core.receive.checks import check_opened
from kvgrpc.core.receive.pull import Pull
from kvgrpc.core.receive.pull_ends import PullEnds
from kvgrpc.core.receive.renewals import Renewals
from kvgrpc.core.receive.reservation import Reservation
from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.accesses import Opening
from kvgrpc.core.tables.peers import Peer
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.values.calls import LayerRange
from kvgrpc.core.values.descriptors import Blocks
from kvgrpc.errors import Reason


class PullCourse(Course[Pull]):
    """What happens to a pull, or to a push that lands here, between its making and its end."""

    operation = Operation.READ

    def __init__(
        self, state: NodeState, peering: Handshakes, lives: PeerLiveness, pulls: MoveTable[Pull], ends: PullEnds
    ) -> None:
        super().__init__(state, peering, lives, pulls, ends)
        self._ended = ends
        self.renewals = Renewals(state, pulls)

    def take(self, pull: Pull, blocks: Blocks, skip: list[int], after_step: int) -> None:
        """The destination's blocks are the transfer's until they are returned."""
        state = self._state
        pull.destination, pull.skip, pull.after_step = blocks, skip, after_step
        if not pull.moves_nothing:
            state.pins.add(pull.transfer_id, PinKind.TARGET, blocks, state.now)

    def opened(self, pull: Pull, opened: Opened) -> None:
        state = self._state
        state.timers.clear(Timer.OPEN_RETRY, pull.name)
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
            phases=self._phase(pull, "queue"),
            waiting_for="blocks" if pull.destination is None else "step",
            peer_transfer_id=opened.transfer_id,
        )
        if pull.destination is None:
            state.tell(transfer.owner, PullOpened(transfer.id, transfer.request_id, pull.claim.tokens))
            state.timers.clear(Timer.QUEUE, pull.name)
            state.timers.set(Timer.BLOCKS, pull.name, transfer.created + state.limits.lease_cap_s)
        self.renewals.start(pull)
        self.try_post(pull)

    def try_post(self, move: Pull) -> None:
        """Moves the bytes once source, destination and step are known."""
        if move.stage is not Stage.OPEN or move.destination is None or not move.has_parts:
            return
        if move.moves_nothing:
            move.begin_round()
            self.settle(move)
        else:
            self._post_when_ready(move)

    def settled(self, move: Pull) -> None:
        """The source's lease held throughout the round."""
        if move.last_round:
            self._ended.succeed(move)
        else:
            assert isinstance(move, Reservation)
            self._next_round(move)

    def landed(self, landing: Reservation, layers_done: tuple[LayerRange, ...]) -> None:
        """More of a push is there: its layers may be used provisionally, and the next part has its time."""
        state = self._state
        self.await_part(landing)
        epoch = landing.part_epoch
        if state.transfers.get(landing.transfer_id).layers_done != layers_done:
            transfer = state.change(landing.transfer_id, layers_done=layers_done, part_epoch=epoch)
            state.tell(transfer.owner, LayersReceived(transfer.id, transfer.request_id, layers_done, epoch))

    def start_over(self, landing: Reservation) -> None:
        """The source has replaced its parts, or taken them back: what is here of them counts no more."""
        state = self._state
        for timer in (Timer.SETTLE, Timer.SETTLE_RETRY, Timer.TRANSFER, Timer.SUMS_ASK):
            state.timers.clear(timer, landing.name)
        state.turns.leave(landing.name)
        landing.left = landing.comparing = None
        if landing.parts is not None and landing.access_id:
            self._ended.close(landing)
        landing.rewind()
        if landing.stage is not Stage.RENDEZVOUS:
            landing.move(Stage.RENDEZVOUS)
        state.change(landing.transfer_id, waiting_for="parts")
        self.landed(landing, ())

    def await_part(self, landing: Reservation) -> None:
        """The source has so long for its next part."""
        state = self._state
        wait_s = landing.registration_timeout_s
        if landing.writers:  # what it writes is known here when it has moved
            wait_s += landing.transfer_timeout_s
        due = min(state.now + wait_s, landing.cap)
        state.timers.set(Timer.REGISTRATION, landing.name, max(due, state.now))

    def _next_round(self, landing: Reservation) -> None:
        state = self._state
        assert landing.parts is not None
        assert landing.progress is not None
        landing.rounds += 1
        landing.settled_bytes = landing.nbytes
        landing.progress.settle(landing.parts, landing.posted)
        landing.move(Stage.OPEN)
        for timer in (Timer.SETTLE, Timer.SETTLE_RETRY):
            state.timers.clear(timer, landing.name)
        state.change(landing.transfer_id, waiting_for="parts")
        self.landed(landing, landing.progress.layers_done)
        self.try_post(landing)

    def reached(self, move: Pull, peer: Peer) -> None:
        """The lead that a pull waited for is connected. A push that lands here is registered there."""
        if isinstance(move, Reservation):
            self._moves.bind(move, peer.key)
            self.send_register(move)
        else:
            self.open(move, peer)

    def send_register(self, landing: Reservation) -> None:
        """Tells the source of a push where the blocks go."""
        request_id = self._state.transfers.get(landing.transfer_id).request_id
        self._state.emit(SendRegister(landing.peer, landing.transfer_id, landing.token, request_id, landing.trace))

    def _opening(self, move: Pull, request_id: str, paths: tuple[str, ...]) -> Opening:
        return Opening(move.access_id, move.token, move.claim, move.transfer_id, request_id, paths)
