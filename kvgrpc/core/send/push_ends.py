"""The ends of pushes and of their registrations, at the source.

A push ends with its lease, through `Leases.end`. While it has no lease, it ends by itself. A destination that fails
does not end its push: as with pulls, another destination may come while the lease lives. A destination that gives up
for good, or dies, counts as a done consumer if the hand-over says RELEASE.
"""

from kvgrpc.core.actions import BlocksReturnedNews, FailedNews, PartsReturnedNews
from kvgrpc.core.events import CloseOutcome
from kvgrpc.core.moves.ends import Ends
from kvgrpc.core.moves.failures import move_failure
from kvgrpc.core.moves.pending_closes import PendingCloses
from kvgrpc.core.send.firmness import Firmness
from kvgrpc.core.send.leases import Leases, consumer_cancelled
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.move import AT_ISSUER, MoveStage
from kvgrpc.core.state.push import Registration, SourcePush
from kvgrpc.core.tables.accesses import AccessState
from kvgrpc.core.tables.leases import LeaseState
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.tables.transfers import Disposition, Failure, State
from kvgrpc.core.values.grants import OnAbort
from kvgrpc.errors import KVGrpcError, Reason

OUTCOMES = {Reason.CANCELLED: CloseOutcome.CANCELLED, Reason.PEER_LOST: CloseOutcome.DROPPED}
"""Outcome for the push, by the reason why a registration ended. After other reasons the destination may come again."""


class PushEnds(Ends[Registration]):
    """Ends registrations and the pushes that they belong to."""

    def __init__(self, state: NodeState, closes: PendingCloses, leases: Leases, firmness: Firmness) -> None:
        super().__init__(state, closes)
        self._leases = leases
        self._firmness = firmness

    # -- registrations

    def fail(self, move: Registration, error: KVGrpcError, *, closed: bool = False) -> None:
        # Only this lead declares a peer dead.
        reason = Reason.PEER_FAILED if error.reason is Reason.PEER_LOST else error.reason
        self.fail_with(move, reason, error.sentence, closed=closed)

    def fail_with(
        self, move: Registration, reason: Reason, message: str, *, closed: bool = False, rank: int | None = None
    ) -> None:
        self.give_up(move, reason, message, OUTCOMES.get(reason, CloseOutcome.FAILED), closed=closed, rank=rank)

    def give_up(
        self,
        move: Registration,
        reason: Reason,
        message: str,
        outcome: CloseOutcome,
        *,
        closed: bool = False,
        rank: int | None = None,
    ) -> None:
        """Ends a registration. `outcome` is what its end means for the push."""
        if closed:
            self._state.send.pushes.drop_access(move.access_id)
            self._state.moves.drop_access(move)
        failure = move_failure(move, reason, message, rank)
        self._over(move, failure.message)
        self.failed(move.push, move.claims.engine_id, message, outcome)

    def failed(self, push: SourcePush, engine_id: str, message: str, outcome: CloseOutcome) -> None:
        """Records that a destination takes nothing, or nothing more, of a push. A cancelled destination is done,
        whatever the grant says. While there are no parts, only the known destinations count.
        """
        push.trouble = f"engine {engine_id}: {message}"
        lease = self._state.send.leases.find(push.lease_id)
        if outcome is CloseOutcome.DROPPED:
            push.dropped.add(engine_id)
            if lease is not None and lease.on_abort is OnAbort.RELEASE:
                push.finished.add(engine_id)
        elif outcome is CloseOutcome.CANCELLED:
            push.cancelled_by[engine_id] = message
            push.finished.add(engine_id)
        if lease is not None:
            lease.trouble = push.trouble
            self._leases.count(lease)
        elif outcome is CloseOutcome.CANCELLED and not push.over and push.all_cancelled:
            self.end(push, State.CANCELLED, consumer_cancelled(engine_id, message, push.phase))
        if not push.over:
            self._state.change(push.transfer_id, waiting_for="registration")

    def done(self, move: Registration) -> None:
        """Ends a registration whose destination has received everything."""
        self._over(move, None)

    def at_rest(self, move: Registration) -> None:
        """Removes an ended registration after its last posting: no write of ours can reach the destination any more."""
        state, push = self._state, move.push
        self._closes.close(move, push.outcome)
        state.pool.pins.drop(move.name, PinKind.ACCESS)
        self._remove(move)
        if (lease := state.send.leases.find(push.lease_id)) is not None:
            self._firmness.unclaimed(lease)
        self.return_parts(push)
        if push.over and not push.posting:
            self._return(push)

    def taken_back(self, push: SourcePush) -> None:
        """Handles the last parts of an ended push that the engine took back, though our postings may still read them.

        Parts that were replaced earlier are not taken back: they are returned when nothing reads them.
        """
        self._take_back(push)
        if not push.reads(self._state.pool.pins):
            self._tell_parts(push)
            self._return(push)

    def _return(self, push: SourcePush) -> None:
        state = self._state
        transfer = state.transfers.find(push.transfer_id)
        if transfer and transfer.memory is Disposition.QUARANTINED:
            state.change(transfer.id, memory=Disposition.RETURNED)
            state.tell(transfer.owner, BlocksReturnedNews(transfer.id, transfer.request_id, push.lease_id))

    # -- pushes

    def end(self, push: SourcePush, end: State, failure: Failure) -> None:
        """Ends a push without success."""
        state = self._state
        lease = state.send.leases.find(push.lease_id)
        if lease is not None:
            self._leases.end(lease, LeaseState.RELEASED, failure, cancelled=end is State.CANCELLED)
            return
        self.end_rest(push, failure)
        held = push.reads(state.pool.pins)
        memory = Disposition.QUARANTINED if held else Disposition.RETURNED
        transfer = state.change(push.transfer_id, state=end, failure=failure, memory=memory)
        state.tell(transfer.owner, FailedNews(transfer.id, transfer.request_id, failure, end is State.CANCELLED))
        if not held:
            state.tell(transfer.owner, BlocksReturnedNews(transfer.id, transfer.request_id))

    def end_rest(self, push: SourcePush, failure: Failure | None) -> None:
        """Ends what is left of a push. Its grants and key are refused for a while. The key of a push that was cancelled
        after both halves had met is not refused, because nothing more can come under it.
        """
        state = self._state
        message = failure.message if failure else "it has succeeded"
        reason = _said(push, failure)
        cancelled = reason is Reason.CANCELLED
        if not (cancelled and push.met):
            by_destinations = cancelled and push.outcome is not CloseOutcome.CANCELLED
            state.tombstones.end_key(push.key, message, state.now, reason, parts_only=by_destinations)
        for token in push.registrations:
            state.tombstones.end_grant(token, message, state.now, reason)
        state.timers.clear(Timer.RENDEZVOUS, push.transfer_id)
        push.over = True
        for move in push.live:
            self._over(move, message)
        self._state.send.pushes.forget(push)

    def start_over(self, push: SourcePush, how: LeaseState) -> None:
        """Discards the parts of this epoch and ends their lease as `how`. The wait for the next epoch starts."""
        state = self._state
        lease = state.send.leases.get(push.lease_id)
        reason = Reason.LEASE_VOIDED if how is LeaseState.VOIDED else Reason.PREEMPTED
        for move in push.live:
            self._shut(move, reason)
        self._leases.retire(lease, how, reason)
        if how is LeaseState.VOIDED:
            self._take_back(push)
            self._tell_returned(push, lease.id)
        else:
            push.returning.append(lease.id)
        push.parts, push.lease_id = None, ""
        state.send.pushes.weigh(push)
        push.part_epoch += 1
        due = min(state.now + state.limits.registration_timeout_s, push.cap)
        state.timers.set(Timer.RENDEZVOUS, push.transfer_id, due)
        state.change(push.transfer_id, lease_id="", waiting_for="parts")
        for move in push.live:
            self._state.stop(move)
            if not move.postings:
                state.pool.pins.drop(move.name, PinKind.ACCESS)
            move.rewind()
            state.moves.weigh(move)
            if move.stage is not MoveStage.RENDEZVOUS:
                move.move(MoveStage.RENDEZVOUS)
        self.return_parts(push)

    def return_parts(self, push: SourcePush) -> None:
        """Gives the blocks of earlier epochs back to the engine, unless our own postings still read them."""
        if not push.posting:
            self._tell_parts(push)

    def _tell_parts(self, push: SourcePush) -> None:
        for lease_id in push.returning:
            self._tell_returned(push, lease_id)
        push.returning.clear()

    def _tell_returned(self, push: SourcePush, lease_id: str) -> None:
        transfer = self._state.transfers.get(push.transfer_id)
        self._state.tell(transfer.owner, PartsReturnedNews(transfer.id, transfer.request_id, lease_id))

    def _take_back(self, push: SourcePush) -> None:
        """Drops the pins of this epoch's blocks: the engine reuses them already, though they may be read."""
        for move in push.registrations.values():
            if move.posted_epoch == push.part_epoch:
                self._state.pool.pins.drop(move.name, PinKind.ACCESS)

    def _over(self, move: Registration, message: str | None) -> None:
        """Ends a registration. `message` tells the destination why, and None means that it knows."""
        self._state.stop(move)
        if message is not None:
            self._closes.close(move, move.push.outcome, message)
        cancelled = move.push.over and move.push.outcome is CloseOutcome.CANCELLED
        self._shut(move, Reason.CANCELLED if cancelled else Reason.LEASE_RELEASED)
        move.move(MoveStage.ENDED)
        self._state.moves.over(move)
        if not move.postings:
            self._state.pool.pins.drop(move.name, PinKind.ACCESS)
            self._remove(move)

    def _shut(self, move: Registration, reason: Reason) -> None:
        """Makes the destination's read access stale."""
        access = self._state.access.rows.get(move.reverse_id)
        if access is not None and access.state is AccessState.OPEN:
            self._leases.outdate(access, reason)
            if move.stage not in AT_ISSUER:  # The destination never learned of the access.
                access.move(AccessState.CLOSED)
                self._state.expect(access, open_=False)
                forget = self._state.now + self._state.limits.settle_timeout_s
                self._state.timers.set(Timer.ACCESS_FORGET, access.id.hex(), forget)

    def _remove(self, move: Registration) -> None:
        self._state.moves.remove(move)
        self._state.send.pushes.remove(move)


def _said(push: SourcePush, failure: Failure | None) -> Reason:
    """Returns the reason given to a destination or a part that comes after the end of its push."""
    if failure is not None and failure.reason in (Reason.SOURCE_FAILED, Reason.LEASE_RECLAIMED):
        return failure.reason
    if failure is not None and failure.reason is Reason.CANCELLED and push.outcome is not CloseOutcome.FAILED:
        return Reason.CANCELLED
    return Reason.TRANSFER_ENDED
