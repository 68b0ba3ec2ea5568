"""The node: a lead's mind. One object owns all state; events go in, actions come out.

    actions = node.handle(event, now)
    when = node.next_deadline()

`handle` first fires every deadline that is due at `now`, in order, then the event: a lease that ends this very moment
has ended before the event is looked at. A call that is refused changes nothing. Same events, same times, same actions.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvgrpc.core.access.serving import Serving
from kvgrpc.core.actions import Acknowledged, Action, Cancelled, SendClose, TransferChanged
from kvgrpc.core.defects import closings, take_over
from kvgrpc.core.events import (
    AccessAnswered,
    AcknowledgeTransfers,
    AllocateBlocks,
    CallAbandoned,
    CancelTransfer,
    ChecksumBlocks,
    ChecksumsAnswered,
    ChecksumsComputed,
    CloseAccess,
    CloseAnswered,
    ConnectPeer,
    DialFailed,
    EndpointOffered,
    Event,
    FinishedBlocks,
    FreeBlocks,
    GiveDestination,
    HandshakeReceived,
    LeasesVoided,
    LifeBegan,
    MemoryGone,
    OpenAccess,
    PartsAnswered,
    PartsReady,
    PeerAlive,
    PeerAnswered,
    PeerMapped,
    PeerSilent,
    PostingEnded,
    ProcessEnded,
    PullBlocks,
    RegisterAnswered,
    RegisterPush,
    Rekeyed,
    ReleaseLease,
    ReleaseQuarantine,
    RenewAnswered,
    RenewLeases,
    ReserveBlocks,
    SettleAccess,
    SettleAnswered,
    StepDone,
    Tick,
    WaitsFor,
)
from kvgrpc.core.idempotency import Begun
from kvgrpc.core.moves.pending_closes import PendingCloses
from kvgrpc.core.peers.handshakes import Handshakes
from kvgrpc.core.peers.liveness import PeerLiveness
from kvgrpc.core.pool.allocations import Allocations
from kvgrpc.core.pool.quarantine import Quarantine
from kvgrpc.core.receive.pulls import Pulls
from kvgrpc.core.send.checksum_prefetch import ChecksumPrefetch
from kvgrpc.core.send.hand_overs import HandOvers
from kvgrpc.core.send.pushes import Pushes
from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.accesses import AccessState
from kvgrpc.core.tables.leases import LeaseState
from kvgrpc.core.tables.peers import Peer, PeerView
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.tables.transfers import Direction, Disposition, Failure, Next, Side, Transfer
from kvgrpc.core.values.grants import Access as AccessKind
from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import InvalidRequest, KVGrpcError, Reason, Unavailable

Handler = Callable[[Any], None]

CANCELLED_BEFORE_ACCESS = "cancelled_before_access"
CANCELLED_IN_FLIGHT = "cancelled_in_flight"
ALREADY_ENDED = "already_ended"
TOMBSTONED = "tombstoned"


class Node:
    """Everything a lead decides. `state` may be read between events; only the node changes it.

    `writers` are the data paths over which it writes what it pushes; over all others the destination reads. With
    `checksums` every block that it reads is compared with its source's before it counts.
    """

    def __init__(
        self, limits: Limits | None = None, writers: frozenset[str] = frozenset(), *, checksums: bool = False
    ) -> None:
        self.state = NodeState(limits or Limits(), writers, checksums=checksums)
        self.sums_ahead = ChecksumPrefetch(self.state)
        self.handover = HandOvers(self.state, self.sums_ahead)
        self._lives = PeerLiveness(self.state)
        self._peering = Handshakes(self.state, self._lives)
        closings = PendingCloses(self.state, self._peering)
        self._pulls = Pulls(self.state, self._peering, self._lives, closings)
        self._pushes = Pushes(self.state, self._peering, self._lives, self.handover, closings)
        self._serving = Serving(self.state, self.handover, self._pulls.deliveries, self._pushes, self.sums_ahead)
        self._proofs = Quarantine(self.state, self._lives, self._peering, self._pulls.deliveries)
        self._pool = Allocations(self.state)
        self.handover.attach(self._pushes)
        self._peering.attach(self._pushes, self._pulls)
        self._proofs.attach(self._serving, (self._pulls, self._pushes))
        self._lives.attach(self._serving, self._pulls, self._pushes, self._peering)
        self._handlers = self._make_handlers()
        self._deadlines = self._make_deadlines()

    def handle(self, event: Event, now: float) -> list[Action]:
        """Fires what is due, then handles the event. `now` never goes back."""
        state = self.state
        assert now >= state.now, "time went back"
        self._fire_due(now)
        call = getattr(event, "call", None)
        if call is None:
            self._handlers[type(event)](event)
            return self._take_actions()
        try:
            state.check_life(call.incarnation)
            known = state.keys.begin(call)
            if known is Begun.NEW:
                self._handlers[type(event)](event)
            elif known is not Begun.JOINED:
                state.emit(replace(known, call_id=call.id))
        except KVGrpcError as error:
            state.refuse(call.id, error)
        return self._take_actions()

    def successor(self, incarnation: int, now: float) -> "tuple[Node, list[Transfer]]":
        """After `handle` has raised, or what it decided could not be performed: a node like this one, in a life of that
        name without an engine, and the transfers that ended with this life. `state.actions` has what was decided.
        """
        state = self.state
        node = type(self)(state.limits, state.writers, checksums=state.checksums)
        return node, take_over(node.state, state, incarnation, now)

    def unclosed(self) -> list[SendClose]:
        """As `successor`, of a node that has raised: what closes its pushes' accesses at destinations."""
        return closings(self._pushes.at_peers(), self.state.incarnation)

    def next_deadline(self) -> float | None:
        """When `handle(Tick(), now)` has something to do, or None."""
        return self.state.timers.next_deadline()

    def peers(self) -> list[PeerView]:
        """All lives of other engines that are known, oldest first."""
        return [self.peer(peer) for peer in self.state.peers.values()]

    def peer(self, peer: Peer) -> PeerView:
        """A life of another engine as it is now."""
        return self._peering.view(peer)

    def oldest_posting(self) -> float | None:
        """When the oldest posting in flight was posted, None while there is none."""
        moves = (self._pulls.oldest_posting(), self._pushes.oldest_posting())
        return min((posted for posted in moves if posted is not None), default=None)

    def missing_proof(self, transfer_id: str) -> str:
        """What would prove the blocks of an ended transfer to be at rest, for people."""
        return self._pulls.missing_proof(transfer_id) or self._pushes.missing_proof(transfer_id)

    def check(self) -> None:
        """Asserts the invariants that tie the tables together. For tests and simulators."""
        state = self.state
        state.pins.check()
        wanted = {(lease.id, PinKind.LEASE) for lease in state.leases}
        reads = [a for a in state.accesses.values() if a.kind is AccessKind.READ]
        wanted |= {(a.owner, PinKind.ACCESS) for a in reads if a.state is AccessState.OPEN}
        wanted |= self._pulls.wanted_pins() | self._pushes.wanted_pins()
        assert {(pin.owner, pin.kind) for pin in state.pins} == wanted, "pins without a reason, or missing"
        for lease in state.leases:
            assert state.now < lease.deadline <= lease.cap, f"{lease.id} outlives its time"
            assert all(state.accesses[id_].state is AccessState.OPEN for id_ in lease.accesses)
        for transfer in state.transfers.unfinished():
            pinned = transfer.direction is Direction.SEND or transfer.memory is Disposition.HELD
            assert pinned, f"{transfer.id} is not over and holds nothing"

    def _make_handlers(self) -> dict[type, Handler]:
        return {
            FinishedBlocks: self._finish,
            PullBlocks: self._pulls.start,
            GiveDestination: self._pulls.give,
            RenewLeases: self.handover.renew,
            ReleaseLease: self.handover.release,
            CancelTransfer: self._cancel,
            AcknowledgeTransfers: self._acknowledge,
            AllocateBlocks: self._pool.allocate,
            FreeBlocks: self._pool.free,
            ConnectPeer: self._peering.connect,
            HandshakeReceived: self._peering.received,
            PeerAnswered: self._peering.answered,
            DialFailed: self._peering.dial_failed,
            PeerAlive: lambda event: self._lives.streaming(event.peer),
            PeerSilent: lambda event: self._lives.silent(event.peer),
            OpenAccess: self._serving.open,
            SettleAccess: self._serving.settle,
            CloseAccess: self._serving.close,
            AccessAnswered: self._each("access_answered"),
            SettleAnswered: self._each("settle_answered"),
            CloseAnswered: self._pulls.close_answered,
            RenewAnswered: self._pulls.renew_answered,
            EndpointOffered: self._peering.endpoint_offered,
            PeerMapped: self._peering.mapped,
            PostingEnded: self._posting_ended,
            StepDone: self._step_done,
            LeasesVoided: self.handover.void,
            LifeBegan: self._begin,
            MemoryGone: lambda _: self._memory_gone(),
            Tick: lambda _: None,
            RegisterPush: self._pushes.register,
            ReserveBlocks: self._pulls.deliveries.reserve,
            PartsReady: self._serving.parts_ready,
            PartsAnswered: self._pushes.parts_answered,
            ChecksumBlocks: self._serving.checksum,
            CallAbandoned: self._abandoned,
            ChecksumsAnswered: self._pulls.checksums_answered,
            ChecksumsComputed: self._summed,
            RegisterAnswered: self._pulls.deliveries.register_answered,
            ProcessEnded: self._proofs.process_ended,
            Rekeyed: self._proofs.rekeyed,
            ReleaseQuarantine: self._proofs.release,
        }

    def _make_deadlines(self) -> dict[Timer, Callable[[str], None]]:
        return {
            Timer.LEASE: self.handover.due,
            Timer.OPEN_WAIT: self._serving.wait_due,
            Timer.ACCESS_FORGET: self._serving.forget,
            Timer.SPENT_IDS: lambda _: self._serving.spent.turn(),
            Timer.PEER_GRACE: self._lives.grace_over,
            Timer.CONNECT: self._peering.connect_due,
            Timer.ADMIT: self._peering.admit_due,
            Timer.IDEMPOTENCY: self.state.key_due,
            Timer.TOMBSTONE: self._forget_cancelled,
            Timer.REFUSED_LEASE: self.handover.forget_refused,
            Timer.ALLOCATION: self._pool.due,
            Timer.SUMS: self._serving.sums.due,
            Timer.QUARANTINE: self._proofs.quarantine_due,
            Timer.REKEY: self._proofs.rekey_due,
        }

    def _fire_due(self, now: float) -> None:
        state = self.state
        while (when := state.timers.next_deadline()) is not None and when <= now:
            state.now = max(state.now, when)
            for timer, name in state.timers.due(state.now):
                handler = self._deadlines.get(timer)
                if handler:
                    handler(name)
                else:
                    (self._pushes if self._pushes.knows(name) else self._pulls).due(timer, name)
        state.now = now

    def _take_actions(self) -> list[Action]:
        self._proofs.look()
        self._give_turns()
        actions, self.state.actions = self.state.actions, []
        return actions

    def _each(self, name: str) -> Handler:
        """Pulls and pushes both hear it: each knows its own."""
        handlers = [getattr(moving, name) for moving in (self._pulls, self._pushes)]

        def hear(event: Event) -> None:
            for handler in handlers:
                handler(event)

        return hear

    def _finish(self, event: FinishedBlocks) -> None:
        if event.waits_for is WaitsFor.REGISTRATION:
            self._pushes.finish(event)
            return
        try:
            lease = self.handover.finish(event)
        except KVGrpcError as error:
            if self.handover.refused(event, error):
                self._serving.lease_refused(event.lease_id)
            raise
        if lease is not None:
            self._serving.lease_announced(lease)

    def _step_done(self, event: StepDone) -> None:
        """A step is done; only some of its layers, if they are named: parts of a push may wait for no more."""
        state = self.state
        if state.description is None:
            return
        layers = max(group.layers for group in state.pool.pool.groups)
        first, count = event.layers or (0, layers)
        steps = state.steps.setdefault(event.rank, [0] * layers)
        before = state.step_done()
        for layer in range(max(first, 0), min(first + count, layers)):
            steps[layer] = max(steps[layer], event.step)
        if state.step_done() > before:
            self._serving.step_done()
            self.sums_ahead.go_on()
            self._pulls.step_done()
        self._pushes.step_done()

    def _posting_ended(self, event: PostingEnded) -> None:
        self._pulls.posting_ended(event)
        self._pushes.posting_ended(event)
        self._serving.posting_ended()

    def _abandoned(self, event: CallAbandoned) -> None:
        self._serving.sums.abandoned(event.call_id)
        self._peering.abandoned(event.call_id)

    def _summed(self, event: ChecksumsComputed) -> None:
        self._pulls.summed(event)
        self._serving.sums.summed(event)

    def _give_turns(self) -> None:
        """Whoever waits for its turn has it, by priority, while there is room."""
        self.state.turns.paused = bool(self.state.rekeying)
        while (name := self.state.turns.next()) is not None:
            self._pulls.take_turn(name)
            self._pushes.take_turn(name)

    def _cancel(self, event: CancelTransfer) -> None:
        """CancelTransfer by id, or by key; a key that is unknown is remembered."""
        state = self.state
        if bool(event.transfer_id) == bool(event.key):
            raise InvalidRequest(Reason.INVALID_FIELD, "name either a transfer_id or a transfer_key")
        if event.transfer_id:
            found = [state.transfers.get(event.transfer_id)]
        else:
            found = state.transfers.with_key(event.key)
            state.bury_key(event.key, event.message)
        outcome = ALREADY_ENDED if found else TOMBSTONED
        in_flight = [self._cancel_one(transfer, event.message) for transfer in found if not transfer.over]
        if in_flight:
            outcome = CANCELLED_IN_FLIGHT if any(in_flight) else CANCELLED_BEFORE_ACCESS
        after = tuple(state.transfers.get(t.id) for t in found)
        state.reply(event.call.id, Cancelled(outcome, after))

    def _cancel_one(self, transfer: Transfer, message: str) -> bool:
        if transfer.direction is Direction.RECEIVE:
            return self._pulls.cancel(transfer, message)
        if self._pushes.knows(transfer.id):
            return self._pushes.cancel(transfer, message)
        self.handover.end(self.state.leases.get(transfer.lease_id), LeaseState.RELEASED)
        return False

    def _acknowledge(self, event: AcknowledgeTransfers) -> None:
        count = sum(self.state.transfers.archive(id_) for id_ in event.transfer_ids)
        self.state.reply(event.call.id, Acknowledged(count))

    def _forget_cancelled(self, name: str) -> None:
        del self.state.cancelled_keys[bytes.fromhex(name)]

    def _memory_gone(self) -> None:
        """What a life before this one left in quarantine is no memory of anybody's any more."""
        for transfer in self.state.transfers.memory_gone():
            self.state.emit(TransferChanged(transfer))

    def _begin(self, event: LifeBegan) -> None:
        """Ends everything of the present incarnation, then starts the next with empty tables.

        The engine of the old one is gone, so nobody is told; whoever watches transfers is.
        """
        state = self.state
        state.attached = False
        gone = Failure(
            Reason.ENGINE_LOST, "the engine was attached anew or is gone", "", Side.SOURCE, next=Next.RECOMPUTE
        )
        error = Unavailable(Reason.ENGINE_LOST, "the engine behind this lead changed", retry_delay_s=1.0)
        for lease in list(state.leases):
            self.handover.end(lease, LeaseState.RELEASED, gone)
        self._pushes.end_all(gone)
        self._pulls.end_all(gone)
        self._serving.end_all(error)
        self._peering.end_all(error)
        self._proofs.end_all(error)
        self._lives.end_all()
        state.timers.clear_all()
        state.begin(
            event.incarnation,
            event.secret,
            event.description,
            attached=event.engine_attached,
            sets_aside=event.sets_aside,
        )
