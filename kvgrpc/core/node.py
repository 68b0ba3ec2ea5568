"""The node: a lead's mind. One object owns all state; events go in, actions come out.

    actions = node.handle(event, now)
    when = node.next_deadline()

`handle` first fires every deadline that is due at `now`, in order, then the event: a lease that ends this very moment
has ended before the event is looked at. A call that is refused changes nothing. Same events, same times, same actions.
"""

from collections.abc import Callable
from typing import Any

from kvgrpc.core.actions import Acknowledged, Action, Cancelled, Reply
from kvgrpc.core.events import (
    AccessAnswered,
    AcknowledgeTransfers,
    AllocateBlocks,
    CancelTransfer,
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
    LifeBegan,
    OpenAccess,
    PeerAlive,
    PeerAnswered,
    PeerMapped,
    PeerSilent,
    PostingEnded,
    PullBlocks,
    ReleaseLease,
    RenewAnswered,
    RenewLeases,
    SettleAccess,
    SettleAnswered,
    StepDone,
    Tick,
)
from kvgrpc.core.handover import HandOver
from kvgrpc.core.leases import LeaseState
from kvgrpc.core.limits import Limits
from kvgrpc.core.peering import Peering
from kvgrpc.core.pool import Pool
from kvgrpc.core.pulling import Pulls
from kvgrpc.core.serving import Serving
from kvgrpc.core.state import NodeState
from kvgrpc.core.timers import Timer
from kvgrpc.core.transfers import Direction, Disposition, Failure, Next, Side, Transfer
from kvgrpc.errors import InvalidRequest, KVGrpcError, Reason, Unavailable

Handler = Callable[[Any], None]

CANCELLED_BEFORE_ACCESS = "cancelled_before_access"
CANCELLED_IN_FLIGHT = "cancelled_in_flight"
ALREADY_ENDED = "already_ended"
TOMBSTONED = "tombstoned"


class Node:
    """Everything a lead decides. `state` may be read between events; only the node changes it."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.state = NodeState(limits or Limits())
        self.handover = HandOver(self.state)
        self._serving = Serving(self.state, self.handover)
        self._peering = Peering(self.state)
        self._pulls = Pulls(self.state, self._peering)
        self._pool = Pool(self.state)
        self._peering.attach(self._pulls, self._serving)
        self._handlers: dict[type, Handler] = {
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
            PeerAlive: lambda event: self._peering.alive(event.peer),
            PeerSilent: lambda event: self._peering.silent(event.peer),
            OpenAccess: self._serving.open,
            SettleAccess: self._serving.settle,
            CloseAccess: self._serving.close,
            AccessAnswered: self._pulls.access_answered,
            SettleAnswered: self._pulls.settle_answered,
            CloseAnswered: self._pulls.close_answered,
            RenewAnswered: self._pulls.renew_answered,
            EndpointOffered: self._peering.endpoint_offered,
            PeerMapped: self._peering.mapped,
            PostingEnded: self._pulls.posting_ended,
            StepDone: self._step_done,
            LifeBegan: self._begin,
            Tick: lambda _: None,
        }
        self._deadlines: dict[Timer, Callable[[str], None]] = {
            Timer.LEASE: self.handover.due,
            Timer.OPEN_WAIT: self._serving.wait_due,
            Timer.ACCESS_FORGET: self._serving.forget,
            Timer.PEER_GRACE: lambda name: self._peering.due(Timer.PEER_GRACE, name),
            Timer.CONNECT: lambda name: self._peering.due(Timer.CONNECT, name),
            Timer.IDEMPOTENCY: self.state.key_due,
            Timer.TOMBSTONE: lambda name: self._forget_tombstone(bytes.fromhex(name)),
            Timer.ALLOCATION: self._pool.due,
        }

    def handle(self, event: Event, now: float) -> list[Action]:
        """Fires what is due, then handles the event. `now` never goes back."""
        state = self.state
        assert now >= state.now, "time went back"
        self._fire_due(now)
        call = getattr(event, "call", None)
        try:
            if call is not None:
                known = state.keys.begin(call)
                if known is None:
                    return self._take_actions()
                if known is not True:
                    state.emit(Reply(call.id, known))  # type: ignore[arg-type]
                    return self._take_actions()
            self._handlers[type(event)](event)
        except KVGrpcError as error:
            if call is None:
                raise
            state.refuse(call.id, error)
        return self._take_actions()

    def next_deadline(self) -> float | None:
        """When `handle(Tick(), now)` has something to do, or None."""
        return self.state.timers.next_deadline()

    def check(self) -> None:
        """Asserts the invariants that tie the tables together. For tests and simulators."""
        state = self.state
        state.pins.check()
        owners = {pin.owner for pin in state.pins}
        live = {lease.id for lease in state.leases}
        accesses = {a.owner for a in state.accesses.values() if a.state.value == "open"}
        targets = {
            t.id for t in state.transfers if t.direction is Direction.RECEIVE and t.memory is not Disposition.RETURNED
        }
        assert live | accesses <= owners <= live | accesses | targets, "pins without a reason, or missing"

    def _fire_due(self, now: float) -> None:
        state = self.state
        while (when := state.timers.next_deadline()) is not None and when <= now:
            state.now = max(state.now, when)
            for timer, name in state.timers.due(state.now):
                handler = self._deadlines.get(timer)
                if handler:
                    handler(name)
                else:
                    self._pulls.due(timer, name)
        state.now = now

    def _take_actions(self) -> list[Action]:
        actions, self.state.actions = self.state.actions, []
        return actions

    def _finish(self, event: FinishedBlocks) -> None:
        try:
            lease = self.handover.finish(event)
        except KVGrpcError:
            self._serving.lease_refused(event.lease_id)
            raise
        if lease is not None:
            self._serving.lease_announced(lease)

    def _step_done(self, event: StepDone) -> None:
        steps = self.state.steps
        steps[event.rank] = max(steps.get(event.rank, 0), event.step)
        self._serving.step_done()
        self._pulls.step_done()

    def _cancel(self, event: CancelTransfer) -> None:
        """CancelTransfer by id, or by key; a key that is unknown is remembered."""
        state = self.state
        if bool(event.transfer_id) == bool(event.key):
            raise InvalidRequest(Reason.INVALID_FIELD, "name either a transfer_id or a transfer_key")
        if event.transfer_id:
            found = [state.transfers.get(event.transfer_id)]
        else:
            found = state.transfers.with_key(event.key)
            state.cancelled_keys[event.key] = event.message or "cancelled"
            deadline = state.now + state.limits.registration_timeout_s
            state.timers.set(Timer.TOMBSTONE, event.key.hex(), deadline)
        outcome = ALREADY_ENDED if found else TOMBSTONED
        for transfer in [t for t in found if not t.over]:
            in_flight = self._cancel_one(transfer, event.message)
            if outcome is not CANCELLED_IN_FLIGHT:
                outcome = CANCELLED_IN_FLIGHT if in_flight else CANCELLED_BEFORE_ACCESS
        after = tuple(state.transfers.get(t.id) for t in found)
        state.reply(event.call.id, Cancelled(outcome, after))

    def _cancel_one(self, transfer: Transfer, message: str) -> bool:
        if transfer.direction is Direction.RECEIVE:
            return self._pulls.cancel(transfer, message)
        self.handover.end(self.state.leases.get(transfer.lease_id), LeaseState.RELEASED)
        return False

    def _acknowledge(self, event: AcknowledgeTransfers) -> None:
        count = sum(self.state.transfers.archive(id_) for id_ in event.transfer_ids)
        self.state.reply(event.call.id, Acknowledged(count))

    def _forget_tombstone(self, key: bytes) -> None:
        self.state.cancelled_keys.pop(key, None)

    def _begin(self, event: LifeBegan) -> None:
        """Ends everything of the present incarnation, then starts the next with empty tables."""
        state = self.state
        gone = Failure(
            Reason.ENGINE_LOST, "the engine was attached anew or is gone", "", Side.SOURCE, next=Next.RECOMPUTE
        )
        error = Unavailable(Reason.ENGINE_LOST, "the engine behind this lead changed", retry_delay_s=1.0)
        for lease in list(state.leases):
            self.handover.end(lease, LeaseState.RELEASED, gone)
        self._pulls.end_all(gone)
        self._serving.end_all(error)
        self._peering.end_all(error)
        for timer, name in list(state.timers.names()):
            state.timers.clear(timer, name)
        state.begin(event.incarnation, event.secret, event.description, attached=event.engine_attached)
