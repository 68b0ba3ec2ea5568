"""Planted bugs: each function breaks a sound function of the core. `mutants` says where each one is planted."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvgrpc.core.actions import BlocksReturnedNews, FailedNews, Operation, Post, Verdicts
from kvgrpc.core.events import AccessAnswered, Opened, RenewLeases
from kvgrpc.core.tables.accesses import AccessState, CloseOutcome, Verdict
from kvgrpc.core.tables.leases import LeaseState
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.tables.transfers import State
from kvgrpc.core.values.grants import read_claims
from kvgrpc.errors import Reason

Make = Callable[[Any], Any]


def overwritten(change: Any) -> Any:
    """News that arrives after a transfer's end replaces the reason of its failure."""

    def changed(self: Any, transfer_id: str, **changes: Any) -> Any:
        failure = self.transfers.get(transfer_id).failure
        late = {} if failure is None else {"failure": replace(failure, message="what came last")}
        return change(self, transfer_id, **late | changes)

    return changed


def ended_again(change: Any) -> Any:
    """A failed transfer becomes cancelled when its blocks come back; the table does not protect the end state."""

    def changed(self: Any, transfer_id: str, **changes: Any) -> Any:
        old = self.current[transfer_id]
        if old.state is State.FAILED:
            self.current[transfer_id] = replace(old, state=State.ACTIVE)
            changes |= {"state": State.CANCELLED}
        return change(self, transfer_id, **changes)

    return changed


def known_only(answered: Any) -> Any:
    """The lead assumes that it knows every access that an answer names."""
    return lambda self, event: (self._closes.sent[event.access_id], answered(self, event))[1]


def any_grant(verify: Any) -> Any:
    """A grant of any life of this engine is accepted."""

    def verified(token: bytes, key: bytes, engine_id: str, incarnation: int, access: Any) -> Any:
        claims = read_claims(token)
        ours = claims.engine_id == engine_id and claims.incarnation != incarnation
        return claims if ours else verify(token, key, engine_id, incarnation, access)

    return verified


def always(answer: object) -> Make:
    """The function always returns `answer`."""
    return lambda _: lambda *_, **__: answer


def never(*timers: Timer) -> Make:
    """Deadlines of these kinds never come."""
    return lambda set_: lambda self, kind, name, when: None if kind in timers else set_(self, kind, name, when)


def anyone(younger: Any) -> Any:
    """Every request counts as the oldest one."""
    return lambda self, asking: younger(self, asking._replace(time_us=0))


def settled_at_once(settle: Any) -> Any:
    return lambda steps, pull: (settle(steps, pull), steps.settled(pull))


def from_memory(answered: Any) -> Any:
    """OpenAccess is retried after a failure, but the blocks of the last answer are read meanwhile."""
    known: dict[bytes, Opened] = {}

    def access_answered(moves: Any, event: AccessAnswered) -> None:
        move = moves._state.moves.of_access(event.access_id)
        if move is None or move.operation is Operation.WRITE:
            pass
        elif isinstance(event.result, Opened):
            known[move.token] = event.result
        elif move.token in known:
            event = replace(event, result=known[move.token])
        answered(moves, event)

    return access_answered


def by_access(count: Any) -> Any:
    """Each ended access counts as a consumer of its own."""

    def _count(self: Any, access: Any, lease: Any, *, received: bool) -> None:
        name = access.consumer
        access.consumer = f"{name}#{access.id.hex()}"
        count(self, access, lease, received=received)
        access.consumer = name

    return _count


def free_when_over(end: Any) -> Any:
    def ended(ends: Any, pull: Any, *args: Any, **fields: Any) -> None:
        pull.postings.clear()
        end(ends, pull, *args, **fields)

    return ended


def any_life(settle: Any) -> Any:
    """A settle of an access that this life does not know is VALID, as if an earlier life had vouched for it."""

    def settled(self: Any, event: Any) -> None:
        known = self._state.access.rows
        if all(row.access_id in known for row in event.settlings):
            settle(self, event)
        else:
            self._state.reply(event.call.id, Verdicts(tuple(Verdict(True) for _ in event.settlings)))

    return settled


def revived(renew_one: Any) -> Any:
    """A late renewal reports an expired lease as live, and reopens the stale accesses under it."""

    def _renew_one(self: Any, ref: Any, ttl_s: float | None, event: Any) -> Any:
        lease = None if ref.key else self._state.send.leases.find(ref.lease_id) if ref.lease_id else _find(self, ref)
        if lease is None or lease.state is not LeaseState.EXPIRED:
            return renew_one(self, ref, ttl_s, event)
        for access in self._state.access.rows.values():
            if access.lease_id == lease.id and access.state is AccessState.STALE:
                access.state, access.stale = AccessState.OPEN, None
        return lease.ttl_s, None, LeaseState.LIVE

    return _renew_one


def _find(renewals: Any, ref: Any) -> Any:
    try:
        return renewals._find(ref, "")
    except Exception:  # noqa: BLE001 - the reference holds no valid grant
        return None


def shortening(renew: Any) -> Any:
    def renewed(lease: Any, now: float, ttl_s: float | None) -> None:
        renew(lease, now, ttl_s)
        lease.deadline = min(now + lease.last_ttl_s, lease.cap)

    return renewed


def at_rest(posting_ended: Any) -> Any:
    """Every ended read counts as at rest, even if the data path does not say so."""

    def ended(self: Any, event: Any) -> None:
        move = self._state.moves.of_posting(event.posting_id)
        reads = move is not None and move.operation is Operation.READ
        posting_ended(self, replace(event, quiesced=event.quiesced or reads))

    return ended


def posted_twice(post_slice: Any) -> Any:
    def _post_slice(steps: Any, move: Any) -> None:
        post_slice(steps, move)
        for action in [action for action in steps._state.actions if isinstance(action, Post)]:
            steps._state.emit(action)

    return _post_slice


def dead_mover(peer_dead: Any) -> Any:
    """The death of a peer's lead counts as proof that the peer writes nothing more."""

    def dead(self: Any, peer: Any) -> None:
        accesses = list(peer.accesses)
        peer_dead(self, peer)
        for access_id in accesses:
            if (reservation := self._state.receive.open_writes.get(access_id)) is not None:
                self._reservations._ends.proved(access_id, reservation)

    return dead


def concluded(post: Any) -> Any:
    """A push settles as soon as its bytes are posted."""

    def _post(steps: Any, push: Any) -> None:
        post(steps, push)
        if push.postings and push.left is None:
            push.postings.clear()
            steps.settle(push)

    return _post


def untold(tell: Any) -> Any:
    return lambda self, owner, news: None if isinstance(news, FailedNews) else tell(self, owner, news)


def all_agree(both: Any) -> Any:
    return lambda self: (both(self)[1],) * 2


def summed_early(announced: Any) -> Any:
    def early(self: Any, lease: Any) -> None:
        step, lease.after_step = lease.after_step, 0
        announced(self, lease)
        lease.after_step = step

    return early


def from_the_first(places: Any) -> Any:
    def first(blocks: Any, wanted: Any) -> Any:
        found = places(blocks, wanted)
        return found and [slice(0, place.stop - place.start) for place in found]

    return first


def proved_anyway(rekeyed: Any) -> Any:
    return lambda self, event: rekeyed(self, replace(event, message=""))


def landed(process_ended: Any) -> Any:
    return lambda self, event: process_ended(self, replace(event, drained=True))


def forgotten_source(end_rest: Any) -> Any:
    """The blocks of the source's own writes lose their pin when the lease ends."""

    def ended(self: Any, push: Any, failure: Any) -> None:
        end_rest(self, push, failure)
        for move in list(push.registrations.values()):
            self._state.pool.pins.drop(move.name, PinKind.ACCESS)

    return ended


def failures_done(count: Any) -> Any:
    """A consumer that failed counts as done."""

    def _count(self: Any, access: Any, lease: Any, *, received: bool) -> None:
        lease.finished.add(access.consumer)
        count(self, access, lease, received=received)

    return _count


def drops_done(count: Any) -> Any:
    """A consumer that gave up counts as done, whatever the grant says about aborts."""

    def _count(self: Any, access: Any, lease: Any, *, received: bool) -> None:
        if access.outcome is CloseOutcome.DROPPED:
            lease.finished.add(access.consumer)
        count(self, access, lease, received=received)

    return _count


def silence_is_valid(due: Any) -> Any:
    def _due(self: Any, timer: Timer, name: str) -> None:
        move = self._state.moves.find(name)
        if timer is Timer.SETTLE and move.operation is Operation.READ:
            self.course(move).settled(move)
        else:
            due(self, timer, name)

    return _due


def kept_in_flight(_: Any) -> Any:
    def leave(self: Any, name: str) -> None:
        self.waiting.pop(name, None)
        self._in_flight.pop(name, 0)

    return leave


def kept_early(forget: Any) -> Any:
    def forgotten(self: Any, name: str) -> None:
        early = {lease_id: dict(accesses) for lease_id, accesses in self._state.access.openings.early.items()}
        forget(self, name)
        self._state.access.openings.early.update(early)

    return forgotten


def silent_end(over: Any) -> Any:
    return lambda self, move, _: over(self, move, None)


def dead_for_good(closed: Any) -> Any:
    """A peer that was declared dead and still writes is not told so before it settles."""

    def _closed(self: Any, access: Any, *, reason: Reason, message: str, quiesced: bool) -> None:
        closed(self, access, reason=Reason.SOURCE_FAILED, message=message, quiesced=quiesced)

    return _closed


def renewals_first(handle: Any) -> Any:
    """Timers that were due before a renewal arrived are handled after the renewal."""

    def handled(self: Any, event: Any, now: float) -> Any:
        if not isinstance(event, RenewLeases):
            return handle(self, event, now)
        self._fire_due = lambda when: setattr(self.state, "now", when)
        try:
            return handle(self, event, now)
        finally:
            del self._fire_due

    return handled


def rest_untold(at_rest: Any) -> Any:
    """A source that gave up a push does not report that its last posting has ended."""

    def kept(self: Any, move: Any) -> None:
        close, self._closes.close = self._closes.close, always(None)(None)
        try:
            at_rest(self, move)
        finally:
            self._closes.close = close

    return kept


def cancelled_for_all(count: Any) -> Any:
    """One cancelled consumer ends the hand-over for all consumers."""

    def _count(self: Any, access: Any, lease: Any, *, received: bool) -> None:
        count(self, access, lease, received=received)
        if access.outcome is CloseOutcome.CANCELLED and lease.live:
            self._leases.end(lease, LeaseState.DONE)

    return _count


def cancelled_for_good(cancel: Any) -> Any:
    """A cancel leaves a tombstone that refuses every later transfer under the same key."""

    def _cancel(self: Any, transfer: Any, event: Any) -> None:
        cancel(self, transfer, event)
        self._state.tombstones.end_key(transfer.key, "cancelled", self._state.now)

    return _cancel


def cancels_are_failures(close: Any) -> Any:
    """A cancelled side reports a failure instead of a cancel."""

    def _close(self: Any, move: Any, outcome: CloseOutcome, message: str = "") -> None:
        close(self, move, CloseOutcome.FAILED if outcome is CloseOutcome.CANCELLED else outcome, message)

    return _close


def postings_unheeded(is_claimed: Any) -> Any:
    """A push without a live destination counts as unclaimed, although its own postings still read its blocks."""

    def _is_claimed(self: Any, lease: Any) -> bool:
        push = self._state.send.pushes.find(lease.transfer_id) if lease.pushed else None
        if push is None or push.live or not push.posting:
            return bool(is_claimed(self, lease))
        for move in push.registrations.values():
            self._state.pool.pins.drop(move.name, PinKind.ACCESS)
        return False

    return _is_claimed


def reclaimed_and_live(_: Any) -> Any:
    """The blocks of a reclaimed lease are returned, but the lease stays live."""

    def carry_out(self: Any, plan: Any) -> None:
        state = self._state
        for lease in plan.leases:
            state.send.soft_leases.take_out(lease)
            state.pool.pins.drop(lease.id, PinKind.LEASE)
            state.tell(lease.owner, BlocksReturnedNews(lease.transfer_id, lease.request_id, lease.id))

    return carry_out


def deaf_reader(cancelled: Any) -> Any:
    """A reader treats the cancel of its source as a failure."""
    return lambda self, peer, row: cancelled(self, peer, replace(row, outcome=CloseOutcome.FAILED))
