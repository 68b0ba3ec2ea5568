"""The course of one push at its source, and its ends.

    (parts, registration) -> connect -> open -> opened -> posted -> settle      where this side moves the bytes
                                                opened -> told                  where the destination does, and settles

What it has in common with a pull is in `move_steps`. A push with a lease ends with it: `HandOver.end` is the one end of
both.
"""

from kvgrpc.core.accesses import Access, AccessState, Opening
from kvgrpc.core.actions import BlocksReturned, Expect, Failed, SendParts
from kvgrpc.core.closing import Closings
from kvgrpc.core.events import Opened
from kvgrpc.core.handover import HandOver
from kvgrpc.core.leases import Lease, LeaseState
from kvgrpc.core.lives import Lives
from kvgrpc.core.move_steps import MoveSteps
from kvgrpc.core.moves import MOVE_TIMERS, Stage
from kvgrpc.core.operation import Operation
from kvgrpc.core.peering import Peering
from kvgrpc.core.peers import Peer
from kvgrpc.core.pins import PinKind
from kvgrpc.core.pull import move_failure
from kvgrpc.core.push import Push, PushTable, check_target
from kvgrpc.core.state import NodeState
from kvgrpc.core.timers import Timer
from kvgrpc.core.transfers import Disposition, Failure, State
from kvgrpc.errors import KVGrpcError, Reason


class PushEnds:
    """The ends of all pushes from here."""

    def __init__(self, state: NodeState, pushes: PushTable, handover: HandOver, closings: Closings) -> None:
        self._state = state
        self._pushes = pushes
        self._handover = handover
        self._closings = closings

    def fail(self, move: Push, error: KVGrpcError, *, closed: bool = False) -> None:
        """Ends a push with an error. `closed`: the destination knows that its access is over."""
        self.fail_with(move, error.reason, error.message, closed=closed)

    def fail_with(
        self, move: Push, reason: Reason, message: str, *, closed: bool = False, rank: int | None = None
    ) -> None:
        """As `fail`."""
        if closed:
            self._pushes.drop_access(move)
        self.end(move, State.FAILED, move_failure(move, reason, message, rank))

    def end(self, push: Push, end: State, failure: Failure) -> None:
        """Ends a push without success."""
        state = self._state
        state.bury_key(push.key, failure.message)
        lease = state.leases.find(push.lease_id)
        if lease is not None:
            self._handover.end(lease, LeaseState.RELEASED, failure, cancelled=end is State.CANCELLED)
            return
        self._over(push, failure.message)
        transfer = state.change(push.transfer_id, state=end, failure=failure, memory=Disposition.RETURNED)
        state.tell(transfer.owner, Failed(transfer.id, transfer.request_id, failure, end is State.CANCELLED))

    def lease_ended(self, lease: Lease, message: str) -> bool:
        """The lease of a push is over, and the push with it; whether our own postings still read its blocks."""
        push = self._pushes.find(lease.transfer_id)
        assert push is not None
        self._state.bury_key(push.key, "the push has succeeded" if lease.received else message)
        push.held = bool(push.postings) and lease.state is not LeaseState.VOIDED
        self._over(push, "" if lease.received else message or "the source gave up")
        return push.held

    def at_rest(self, move: Push) -> None:
        """The last posting of an ended push is over: nothing of ours writes at the destination any more."""
        state = self._state
        self._closings.close(move, dropped=True)
        state.pins.drop(move.transfer_id, PinKind.ACCESS)
        self._pushes.remove(move)
        if move.held:
            transfer = state.change(move.transfer_id, memory=Disposition.RETURNED)
            state.tell(transfer.owner, BlocksReturned(transfer.id, transfer.request_id, move.lease_id))

    def _over(self, push: Push, message: str) -> None:
        """`message` tells the destination why; empty when it knows."""
        for timer in MOVE_TIMERS:
            self._state.timers.clear(timer, push.transfer_id)
        if message and push.registered:
            self._closings.close(push, dropped=True, message=message)
        push.move(Stage.ENDED)
        if not push.held:
            self._state.pins.drop(push.transfer_id, PinKind.ACCESS)
        if not push.postings:
            self._pushes.remove(push)


class PushSteps(MoveSteps[Push]):
    """What happens to a push between its making and its end."""

    operation = Operation.WRITE

    def __init__(
        self, state: NodeState, peering: Peering, lives: Lives, pushes: PushTable, ends: PushEnds,
        handover: HandOver,
    ) -> None:  # fmt: skip
        super().__init__(state, peering, lives, pushes, ends)
        self._handover = handover

    def reached(self, move: Push, peer: Peer) -> None:
        """The destination's lead is connected; the access is opened as soon as there is a part."""
        if move.parts is None:
            self._moves.bind(move, peer.key)
        else:
            self.open(move, peer)

    def open(self, move: Push, peer: Peer) -> None:
        paths = {path.data_path for path in peer.paths.values()}
        move.writes = paths <= self._state.writers
        if not move.writes and move.reverse_id not in self._state.accesses:
            self._let_read(move, peer)
        super().open(move, peer)

    def opened(self, push: Push, opened: Opened) -> None:
        """The destination said which blocks are to be filled."""
        state = self._state
        state.timers.clear(Timer.OPEN_RETRY, push.transfer_id)
        peer = state.peers[push.peer]
        wrong = check_target(peer.description, push, opened)
        if wrong:
            self._ends.fail_with(push, Reason.PEER_FAILED, f"the destination's answer makes no sense: {wrong}")
            return
        if opened.memory_generation != peer.description.memory_generation:
            self._lives.forget(push.peer)
            message = "the destination registered its memory anew since the handshake"
            self._ends.fail_with(push, Reason.MEMORY_CHANGED, message)
            return
        push.opened = opened
        push.move(Stage.OPEN)
        state.change(
            push.transfer_id,
            state=State.ACTIVE,
            phases=self._phase(push, "queue"),
            waiting_for="parts",
            peer_transfer_id=opened.transfer_id,
        )
        self.try_post(push)

    def try_post(self, move: Push) -> None:
        """Moves what is ready, or tells the destination of it."""
        if move.stage is not Stage.OPEN:
            return
        assert move.parts is not None
        done = move.posted if move.writes else move.told
        step = self._state.step_done()
        fresh = move.parts.since(done)
        late = next((i for i, part in enumerate(fresh) if part.after_step > step), len(fresh))
        move.ready = done + late
        # What can move does; only when nothing can, the step is what it waits for.
        move.after_step = fresh[0].after_step if fresh and not late else 0
        if late < len(fresh):
            self._moves.await_step(move)
        if not fresh:
            return
        lease = self._state.leases.get(move.lease_id)
        self._handover.extend(lease, move.transfer_timeout_s + self._state.limits.settle_timeout_s)
        if move.writes:
            self._post_when_ready(move)
        elif late and not move.telling:
            self._tell(move)

    def tell(self, push: Push) -> None:
        """Says again which parts are ready."""
        self._state.emit(SendParts(push.peer, push.access_id, push.rows(), push.trace))

    def settled(self, move: Push) -> None:
        """The destination's target held throughout the round."""
        state = self._state
        lease = state.leases.get(move.lease_id)
        lease.nbytes_done = move.nbytes
        if move.last_round:
            lease.received.add(move.claims.engine_id)
            lease.finished.add(move.claims.engine_id)
            self._handover.count(lease)
            return
        move.rounds += 1
        move.settled_bytes = move.nbytes
        move.move(Stage.OPEN)
        for timer in (Timer.SETTLE, Timer.SETTLE_RETRY):
            state.timers.clear(timer, move.transfer_id)
        state.change(move.transfer_id, waiting_for="parts")
        self.try_post(move)

    def _post(self, move: Push) -> None:
        assert move.parts is not None
        fresh = move.parts.since(move.posted)[: move.ready - move.posted]
        for part in fresh:
            self._state.pins.extend(move.transfer_id, PinKind.ACCESS, part.blocks, self._state.now)
        super()._post(move)

    def _tell(self, push: Push) -> None:
        push.telling = push.ready
        assert push.parts is not None
        access = self._state.accesses[push.reverse_id]
        for part in push.parts.since(push.told)[: push.ready - push.told]:
            self._state.pins.extend(access.owner, PinKind.ACCESS, part.blocks, self._state.now)
        self._state.change(push.transfer_id, waiting_for="")
        self.tell(push)

    def _let_read(self, push: Push, peer: Peer) -> None:
        """Opens a READ access on our own lease, for the destination."""
        state = self._state
        opening = Opening(push.reverse_id, b"", None)
        access = Access(opening, peer.description.engine_id, peer.key, push.lease_id, state.now)
        access.move(AccessState.OPEN)
        state.accesses[access.id] = access
        peer.accesses[access.id] = None
        state.leases.get(push.lease_id).opened(access.id, access.consumer)
        nothing = tuple(ids[:0] for ids in state.leases.get(push.lease_id).blocks)
        state.pins.add(access.owner, PinKind.ACCESS, nothing, state.now)
        state.emit(Expect(access.owner, open=True))

    def _opening(self, move: Push, request_id: str, paths: tuple[str, ...]) -> Opening:
        reverse = b"" if move.writes else move.reverse_id
        return Opening(
            move.access_id, move.token, None, move.transfer_id, request_id, paths, reverse, move.content,
            move.part_epoch,
        )  # fmt: skip
