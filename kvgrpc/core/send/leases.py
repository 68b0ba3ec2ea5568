"""Leases of this engine from their beginning to their end, whatever was handed over under them.

The end of a lease ends its pins, its accesses and its SEND transfer in the same step. An engine mints the ids of its
leases itself: it announces a lease by its grant before its lead knows the lease.
"""

from kvgrpc.core.actions import BlocksReturnedNews, FailedNews, HandedOver, Released
from kvgrpc.core.events import FinishedBlocks, LeaseRef, LeasesVoided, ReleaseLease, WaitsFor
from kvgrpc.core.send.firmness import Firmness
from kvgrpc.core.send.lease_renewals import LeaseRenewals
from kvgrpc.core.send.weak_claims import WeakClaims
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.push import SourcePush
from kvgrpc.core.tables.accesses import Access, AccessState
from kvgrpc.core.tables.leases import LEASE_BYTES, Lease, LeaseState, LeaseTimes
from kvgrpc.core.tables.ledger import RowKind
from kvgrpc.core.tables.offer_index import first_unit, indexed_bytes
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.tables.transfers import TRANSFER_BYTES, Disposition, Failure, Side, State
from kvgrpc.core.values.block_ids import Blocks, blocks_bytes, no_blocks
from kvgrpc.core.values.content import ContentId
from kvgrpc.core.values.grants import AccessKind, Claims, check_consumer, mint, verify
from kvgrpc.core.values.ids import mint_lease_id
from kvgrpc.core.values.limits import granted_firm_ttl
from kvgrpc.core.values.owners import ENGINE, ENGINE_SIDE, EVERYONE, Thing, ThingKind, Verb, may, owns, tenant_of
from kvgrpc.core.values.request_times import heard
from kvgrpc.errors import AlreadyExists, NextStep, PermissionDenied, Reason, full, invalid

WANTED_ENDS = frozenset({Reason.CANCELLED, Reason.LEASE_RELEASED, Reason.LEASE_VOIDED})
"""Reasons of an early lease end that is no failure."""


def send_failure(lease: Lease) -> Failure | None:
    """Returns why the SEND transfer of an ended lease did not succeed, or None when it did."""
    if lease.state is LeaseState.DONE and lease.received:
        return None
    messages = {
        LeaseState.DONE: "every consumer dropped it",
        LeaseState.EXPIRED: f"no consumer was done within the lease ({lease.ttl_s:g} s, {lease.renewals} renewals)",
        LeaseState.RELEASED: "the lease was released",
        LeaseState.VOIDED: "the engine took its blocks back",
        LeaseState.RECLAIMED: "its blocks were needed while nobody had claimed it",
    }
    if lease.yielded:
        messages[LeaseState.RECLAIMED] = "an older request needed its blocks, and its readers had none of their own yet"
    phase = "rendezvous" if lease.pushed else "readers"
    if lease.state is LeaseState.DONE and lease.cancelled_by:
        engine_id, why = next(reversed(lease.cancelled_by.items()))
        return consumer_cancelled(engine_id, why, phase)
    reason = Reason.CANCELLED if lease.state is LeaseState.DONE else lease.end_reason
    if lease.pushed and lease.state is LeaseState.EXPIRED:
        reason = Reason.REGISTRATION_TIMEOUT
    message = messages[lease.state] + (f"; the last one that failed: {lease.trouble}" if lease.trouble else "")
    return Failure(reason, message, phase, Side.SOURCE, next=NextStep.RECOMPUTE)


def consumer_cancelled(engine_id: str, why: str, phase: str) -> Failure:
    """Returns the failure of a SEND whose last consumer was cancelled."""
    message = f"engine {engine_id} cancelled it: {why}"
    return Failure(Reason.CANCELLED, message, phase, Side.DESTINATION, next=NextStep.RECOMPUTE)


LEASE_ID_BYTES_MAX = 64


def may_mint(state: NodeState, event: FinishedBlocks) -> bool:
    """Returns whether the caller may choose lease ids. Where an engine is attached, only the engine may."""
    return may(event.call.principal, Verb.MINT, Thing(ThingKind.LEASE, ENGINE if state.life.attached else EVERYONE))


def check_lease_id(state: NodeState, event: FinishedBlocks) -> None:
    """Raises PermissionDenied (NOT_OWNER) for a lease id that the caller may not mint, InvalidRequest (INVALID_FIELD)
    for one that is too long, and AlreadyExists (TRANSFER_EXISTS) for one that was used before.
    """
    lease_id = event.lease_id
    if lease_id and not may_mint(state, event):
        raise PermissionDenied(Reason.NOT_OWNER, "the attached engine alone mints lease ids: leave it out")
    if len(lease_id) > LEASE_ID_BYTES_MAX:
        raise invalid("for_readers.lease_id", f"has at most {LEASE_ID_BYTES_MAX} characters")
    if lease_id and (state.send.leases.known(lease_id) or lease_id in state.tombstones.leases):
        raise AlreadyExists(Reason.TRANSFER_EXISTS, f"lease id {lease_id} was used already: mint a new one")


class Leases:
    """The leases of this engine."""

    def __init__(self, state: NodeState, firmness: Firmness, weak_claims: WeakClaims) -> None:
        self._state = state
        self._firmness = firmness
        self.renewals = LeaseRenewals(state, firmness, weak_claims, self.find)
        self._minted = 0

    def new(self, event: FinishedBlocks, blocks: Blocks, content: ContentId, ttl_s: float) -> Lease:
        """Returns the lease that a hand-over would make. Changes nothing. Raises AlreadyExists, PermissionDenied,
        InvalidRequest or Exhausted.
        """
        state = self._state
        if len(state.send.leases) >= (most := state.limits.leases):
            raise full(f"{most} leases are live", most, reason=Reason.QUEUE_FULL)
        payer = event.call.payer
        state.ledger.check_rows(RowKind.LEASE, payer, state.limits.leases)
        check_lease_id(state, event)
        nbytes = LEASE_BYTES + TRANSFER_BYTES * event.transfer + 2 * blocks_bytes(blocks) + len(content.digests)
        if event.findable:
            nbytes += indexed_bytes(content)
        state.ledger.check(payer, nbytes)
        return Lease(
            id=event.lease_id or mint_lease_id(state.life.secret, state.life.incarnation, "lead", self._minted + 1),
            blocks=blocks,
            content=content,
            granted=state.now,
            ttl_s=ttl_s,
            last_ttl_s=ttl_s,
            deadline=min(state.now + ttl_s, state.now + state.limits.lease_cap_s),
            cap=state.now + state.limits.lease_cap_s,
            firm_ttl_s=granted_firm_ttl(event.firm_ttl_s, state.limits),
            firm_until=state.now,
            consumers=max(event.consumers, 1),
            on_abort=event.on_abort,
            owner=event.call.principal,
            request_id=event.request_id,
            trace=event.call.trace,
            after_step=event.after_step,
            request_time_us=heard(event.request_time_us, event.call.wall_us, own=event.call.principal in ENGINE_SIDE),
            pushed=event.waits_for is WaitsFor.REGISTRATION,
            takes_registrations=event.takes_registrations,
            labels=event.labels,
            tenant=event.tenant or tenant_of(event.call.principal),
            bound_to=event.bound_to,
            findable=event.findable,
            stands_for=event.stands_for,
        )

    def add(self, lease: Lease, event: FinishedBlocks) -> None:
        """Adds the lease to the tables and pins its blocks."""
        state = self._state
        self._minted += not event.lease_id
        state.pool.pins.add(lease.id, PinKind.LEASE, lease.blocks, state.now)
        state.send.leases.add(lease, event.call.payer)
        if lease.findable:
            first = first_unit(state.life.engine.pool.groups, lease.content)
            state.send.offers.add(lease.id, lease.tenant, lease.content, first)
        state.timers.set(Timer.LEASE, lease.id, lease.deadline)

    def extend(self, lease: Lease, for_s: float) -> None:
        """Extends a push's lease to `for_s` from now, up to the cap, and never shortens it. Makes it firm again."""
        lease.deadline = max(lease.deadline, min(self._state.now + for_s, lease.cap))
        self._firmness.handed_over(lease)

    def preview(self, lease: Lease) -> HandedOver:
        """Returns the answer that shows a lease which would be granted. It has no id, because it does not exist."""
        shown = lease.snapshot()
        shown.id = shown.transfer_id = ""
        shown.blocks = no_blocks(len(lease.blocks))
        return HandedOver(shown, self.times(lease), None, b"")

    def times(self, lease: Lease) -> LeaseTimes:
        now = self._state.now
        if lease.state is not LeaseState.LIVE:
            return LeaseTimes(0.0, 0.0, now - lease.granted, None)
        remaining_s, cap_remaining_s = max(lease.deadline - now, 0.0), max(lease.cap - now, 0.0)
        return LeaseTimes(remaining_s, cap_remaining_s, now - lease.granted, self._firmness.soft_in_s(lease))

    def find(self, ref: LeaseRef, caller: str = "") -> Lease:
        """Returns the lease, live or ended. Raises NotFound, also for a lease of another tenant than the caller, or the
        errors of an invalid grant, or PermissionDenied (GRANT_BOUND) for a grant of another consumer. The owner may use
        every grant.
        """
        state = self._state
        if not ref.token:
            return state.send.leases.get(ref.lease_id, caller)
        claims = verify(
            ref.token, state.life.grant_key, state.life.engine.engine_id, state.life.incarnation, AccessKind.READ
        )
        lease = state.send.leases.get(claims.lease_id, caller)
        if not owns(caller, lease.owner):
            check_consumer(caller, claims)
        return lease

    def release(self, event: ReleaseLease) -> None:
        """Handles ReleaseLease: ends a live lease. An ended lease stays unchanged."""
        state = self._state
        lease = self.find(event.lease, event.call.principal)
        blocks = lease.blocks
        if event.validate_only:
            state.reply(event.call.id, Released(lease.snapshot(), self.times(lease), self._would_free(lease)))
            return
        if lease.live:
            self.end(lease, LeaseState.RELEASED)
        freed = tuple(state.pool.pins.unpinned(group, ids) for group, ids in enumerate(blocks))
        state.reply(event.call.id, Released(lease.snapshot(), self.times(lease), freed))

    def void(self, event: LeasesVoided) -> None:
        """Ends the leases whose blocks the engine took back. `Pushes.voided` handles those of pushes."""
        for lease_id in event.lease_ids:
            lease = self._state.send.leases.find(lease_id)
            if lease is None or lease.pushed:
                self._state.react.lease_voided(lease_id)
            elif lease.live:
                self.end(lease, LeaseState.VOIDED)

    def due(self, lease_id: str) -> None:
        """Handles a lease's deadline: the lease expires unless it was renewed."""
        lease = self._state.send.leases.get(lease_id)
        if lease.deadline > self._state.now:
            self._state.timers.set(Timer.LEASE, lease_id, lease.deadline)
        else:
            self.end(lease, LeaseState.EXPIRED)

    def count(self, lease: Lease) -> None:
        """Counts the consumers that are done and ends the lease with the last one. A consumer that is done with
        replaced parts of a push is done with the new parts.
        """
        transfer = self._state.transfers.find(lease.transfer_id)
        if not lease.live:
            present = None if transfer is None else self._state.send.leases.find(transfer.lease_id)
            if present is None or not present.live:
                return
            lease = present
        done = lease.done
        if done >= lease.consumers:
            self.end(lease, LeaseState.DONE)
            return
        self._firmness.unclaimed(lease)
        if transfer and (transfer.consumers_done, transfer.nbytes_done) != (done, lease.nbytes_done):
            self._state.change(transfer.id, consumers_done=done, nbytes_done=lease.nbytes_done)

    def end(self, lease: Lease, how: LeaseState, failure: Failure | None = None, *, cancelled: bool = False) -> None:
        """Ends a live lease with its pins, accesses and transfer. `failure` overrides the transfer's."""
        state = self._state
        lease.end(how)
        failure = failure or send_failure(lease)
        push = state.send.pushes.find(lease.transfer_id)
        if state.moves.checksums:
            state.react.lease_ended(lease)
        if push is not None:
            state.react.push_ended(push, failure)
        self._close(lease, lease.end_reason)
        if lease.transfer_id:
            self._end_send(lease, push, failure, cancelled=cancelled)
        else:
            state.tell(lease.owner, BlocksReturnedNews("", lease.request_id, lease.id))
        if how is LeaseState.DONE and lease.received and lease.stands_for:
            others = state.send.leases.stood_for(lease)
            for other in others:
                other.read_as(lease, state.pool.bytes_of([len(ids) for ids in other.blocks]))
            for other in others:
                self.end(other, LeaseState.DONE)

    def retire(self, lease: Lease, how: LeaseState, reason: Reason) -> None:
        """Ends the live lease of replaced parts, while its push goes on. Its readers are told `reason`."""
        lease.end(how)
        self._close(lease, reason)

    def outdate(self, access: Access, reason: Reason) -> None:
        """Makes an open access stale: later reads under it are not valid."""
        state = self._state
        access.move(AccessState.STALE)
        access.stale = reason
        state.pool.pins.drop(access.owner, PinKind.ACCESS)
        state.access.weigh(access)
        lease = state.send.leases.get(access.lease_id)
        lease.closed(access.id)
        self._firmness.unclaimed(lease)
        # Its reader closes it. If not, it is forgotten after the lease cap, which no transfer exceeds.
        state.timers.set(Timer.ACCESS_FORGET, access.id.hex(), state.now + state.limits.lease_cap_s)

    def _close(self, lease: Lease, reason: Reason) -> None:
        """Removes everything that depends on an ended lease."""
        state = self._state
        state.timers.clear(Timer.LEASE, lease.id)
        if state.life.mirrored:
            state.send.mirrors.drop(lease)
        self._firmness.ended(lease)
        if lease.findable:
            state.send.offers.remove(lease.id)
        for access_id in list(lease.accesses):
            self.outdate(state.access.rows[access_id], reason)
        state.pool.pins.drop(lease.id, PinKind.LEASE)
        state.send.leases.ended(lease, state.now)
        if lease.waiting:
            state.react.lease_missed(lease)

    def _would_free(self, lease: Lease) -> Blocks:
        """Returns the blocks that the lease's end would free: those pinned only by the lease and what ends with it."""
        state = self._state
        owners = [(lease.id, PinKind.LEASE)]
        owners += [(state.access.rows[access_id].owner, PinKind.ACCESS) for access_id in lease.accesses]
        push = state.send.pushes.find(lease.transfer_id)
        if push is not None:
            moves = push.registrations.values()
            owners += [(move.name, PinKind.ACCESS) for move in moves if not move.postings]
        return state.pool.pins.unpinned_without(owners, lease.blocks)

    def _end_send(self, lease: Lease, push: SourcePush | None, failure: Failure | None, *, cancelled: bool) -> None:
        state = self._state
        transfer = state.transfers.get(lease.transfer_id)
        held = push is not None and push.reads(state.pool.pins)
        if failure is None:
            end = State.SUCCEEDED
        else:
            end = State.CANCELLED if cancelled or failure.reason in WANTED_ENDS else State.FAILED
        state.change(
            transfer.id,
            state=end,
            memory=Disposition.QUARANTINED if held else Disposition.RETURNED,
            failure=failure,
            consumers_done=lease.done,
            nbytes_done=lease.nbytes_done,
        )
        if failure:
            state.tell(lease.owner, FailedNews(transfer.id, transfer.request_id, failure, end is State.CANCELLED))
        if not held:
            news = BlocksReturnedNews(transfer.id, transfer.request_id, lease.id, lease.telemetries)
            state.tell(lease.owner, news)


def read_grant(state: NodeState, lease: Lease, key: bytes) -> bytes:
    """Returns a READ grant on a lease, with that transfer key."""
    engine = state.life.engine
    claims = Claims(
        AccessKind.READ, engine.engine_id, state.life.incarnation, engine.address, lease.id, key, lease.ttl_s,
        sum(map(len, lease.blocks)), lease.content.tokens, lease.on_abort,
        tenant=lease.tenant, bound_to=lease.bound_to, request_time_us=lease.request_time_us,
    )  # fmt: skip
    return mint(claims, state.life.grant_key)
