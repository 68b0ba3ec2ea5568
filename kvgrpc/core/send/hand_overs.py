"""Handing blocks over: FinishedBlocks for readers, GrantLease, and the life of a lease.

A hand-over pins its blocks under a lease. Users follow the SEND transfer beside it. The end of a lease ends its pins,
its accesses and its transfer in the same step.
"""

from dataclasses import replace

from kvgrpc.core.actions import BlocksReturnedNews, FailedNews, HandedOver, LeaseView, Released
from kvgrpc.core.events import FinishedBlocks, LeaseRef, LeasesVoided, ReleaseLease, WaitsFor
from kvgrpc.core.send import stand_in_leases
from kvgrpc.core.send.firmness import Firmness
from kvgrpc.core.send.lease_ids import LEASE_ID_BYTES_MAX, check_lease_id, may_mint
from kvgrpc.core.send.lease_renewals import LeaseRenewals
from kvgrpc.core.send.listed_blocks import check_covers
from kvgrpc.core.send.send_failures import WANTED_ENDS, send_failure
from kvgrpc.core.send.weak_claims import WeakClaims
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.kept_accesses import weigh_access
from kvgrpc.core.tables.accesses import Access, AccessState
from kvgrpc.core.tables.leases import LEASE_BYTES, Lease, LeaseState
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.tables.transfers import TRANSFER_BYTES, Direction, Disposition, Failure, State, Transfer
from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.content import ContentId
from kvgrpc.core.values.grants import AccessKind, Claims, mint, verify
from kvgrpc.core.values.ids import check_transfer_key, mint_lease_id
from kvgrpc.core.values.kept_blocks import blocks_bytes, no_blocks
from kvgrpc.core.values.limits import granted_firm_ttl, granted_ttl
from kvgrpc.core.values.owners import ENGINE, ENGINE_SIDE, tenant_of
from kvgrpc.core.values.request_times import heard
from kvgrpc.errors import (
    AlreadyExists,
    Exhausted,
    InvalidRequest,
    KVGrpcError,
    PreconditionFailed,
    Reason,
    Unavailable,
    invalid,
)


class HandOvers:
    """The hand-overs of this engine and their leases."""

    def __init__(self, state: NodeState, firmness: Firmness, weak_claims: WeakClaims) -> None:
        self._state = state
        self._firmness = firmness
        self.renewals = LeaseRenewals(state, firmness, weak_claims, self.find)
        self._minted = 0

    def finish(self, event: FinishedBlocks) -> None:
        """Handles FinishedBlocks (READERS) and GrantLease."""
        try:
            self._finish(event)
        except KVGrpcError as error:
            if self._refused(event, error):
                self._state.react.lease_refused(event.lease_id)
            raise

    def _finish(self, event: FinishedBlocks) -> None:
        state = self._state
        blocks, content, ttl_s = self._check(event)
        lease = self.new_lease(event, blocks, content, ttl_s)
        token = self._token(lease, event.key)
        if event.validate_only:
            state.reply(event.call.id, HandedOver(self.preview(lease), None, b""))
            return
        self.add(lease, event)
        stand_in_leases.keep(state, lease)
        self._firmness.handed_over(lease)
        transfer = self._send(lease, event) if event.transfer else None
        state.reply(event.call.id, HandedOver(self.view(lease), transfer, token))
        state.react.lease_began(lease)

    def new_lease(self, event: FinishedBlocks, blocks: Blocks, content: ContentId, ttl_s: float) -> Lease:
        """Returns the lease that a hand-over would make. Changes nothing. Raises AlreadyExists, PermissionDenied,
        InvalidRequest or Exhausted.
        """
        state = self._state
        if len(state.leases) >= state.limits.leases:
            most = state.limits.leases
            raise Exhausted(
                Reason.QUEUE_FULL, f"{most} leases are live", retry_delay_s=1.0, metadata={"limit": str(most)}
            )
        check_lease_id(state, event)
        nbytes = LEASE_BYTES + TRANSFER_BYTES * event.transfer + 2 * blocks_bytes(blocks) + len(content.digests)
        state.ledger.check(event.call.payer, nbytes)
        return Lease(
            id=event.lease_id or mint_lease_id(state.secret, state.incarnation, "lead", self._minted + 1),
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
            stands_for=event.stands_for,
        )

    def add(self, lease: Lease, event: FinishedBlocks) -> None:
        """Adds the lease to the tables and pins its blocks."""
        state = self._state
        self._minted += not event.lease_id
        state.pins.add(lease.id, PinKind.LEASE, lease.blocks, state.now)
        state.leases.add(lease, event.call.payer)
        state.timers.set(Timer.LEASE, lease.id, lease.deadline)

    def extend(self, lease: Lease, for_s: float) -> None:
        """Extends a push's lease to `for_s` from now, up to the cap, and never shortens it. Makes it firm again."""
        lease.deadline = max(lease.deadline, min(self._state.now + for_s, lease.cap))
        self._firmness.handed_over(lease)

    def _refused(self, event: FinishedBlocks, error: KVGrpcError) -> bool:
        """Returns, after a refusal, whether the lease will never come, and remembers that for waiting openings.

        A client repeats a call that failed for a passing reason. Nothing repeats a call of the engine's session: it has
        already announced the lease and is told that it failed.
        """
        state = self._state
        repeated = event.call.principal != ENGINE and isinstance(error, Exhausted | Unavailable)
        if event.validate_only or not event.lease_id or repeated or not may_mint(state, event):
            return False
        if state.leases.known(event.lease_id) or len(event.lease_id) > LEASE_ID_BYTES_MAX:
            return False
        for oldest in state.refused_leases.bury(event.lease_id, None, 0):
            state.timers.clear(Timer.REFUSED_LEASE, oldest)
        state.timers.set(Timer.REFUSED_LEASE, event.lease_id, state.now + state.limits.registration_timeout_s)
        return True

    def forget_refused(self, lease_id: str) -> None:
        """Forgets a refused lease."""
        del self._state.refused_leases[lease_id]

    def release(self, event: ReleaseLease) -> None:
        """Handles ReleaseLease: ends a live lease. An ended lease stays unchanged."""
        state = self._state
        lease = self.find(event.lease, event.call.principal)
        blocks = lease.blocks
        if event.validate_only:
            state.reply(event.call.id, Released(self.view(lease), self._would_free(lease)))
            return
        if lease.live:
            self.end(lease, LeaseState.RELEASED)
        freed = tuple(state.pins.unpinned(group, ids) for group, ids in enumerate(blocks))
        state.reply(event.call.id, Released(self.view(lease), freed))

    def void(self, event: LeasesVoided) -> None:
        """Ends the leases whose blocks the engine took back. `Pushes.voided` handles those of pushes."""
        for lease_id in event.lease_ids:
            lease = self._state.leases.find(lease_id)
            if lease is None or lease.pushed:
                self._state.react.lease_voided(lease_id)
            elif lease.live:
                self.end(lease, LeaseState.VOIDED)

    def find(self, ref: LeaseRef, caller: str = "") -> Lease:
        """Returns the lease, live or ended. Raises NotFound, also for a lease of another tenant than the caller, or the
        errors of an invalid grant.
        """
        state = self._state
        if not ref.token:
            return state.leases.get(ref.lease_id, caller)
        claims = verify(ref.token, state.grant_key, state.pool.engine_id, state.incarnation, AccessKind.READ)
        return state.leases.get(claims.lease_id, caller)

    def due(self, lease_id: str) -> None:
        """Handles a lease's deadline: the lease expires unless it was renewed."""
        lease = self._state.leases.get(lease_id)
        if lease.deadline > self._state.now:
            self._state.timers.set(Timer.LEASE, lease_id, lease.deadline)
        else:
            self.end(lease, LeaseState.EXPIRED)

    def count(self, lease: Lease) -> None:
        """Counts the consumers that are done and ends the lease with the last one. A consumer that is done with
        replaced parts of a push is done with the new parts.
        """
        transfer = self._state.transfers.find(lease.transfer_id)
        if transfer is not None and not lease.live:
            lease = self._state.leases.find(transfer.lease_id) or lease
        if not lease.live:
            return
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
        state.react.lease_ended(lease, failure)
        self._close(lease, lease.end_reason)
        if lease.transfer_id:
            self._end_send(lease, failure, cancelled=cancelled)
        else:
            state.tell(lease.owner, BlocksReturnedNews("", lease.request_id, lease.id))
        if how is LeaseState.DONE and lease.received:
            for other in stand_in_leases.read(state, lease):
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
        state.pins.drop(access.owner, PinKind.ACCESS)
        weigh_access(state, access)
        lease = state.leases.get(access.lease_id)
        lease.closed(access.id)
        self._firmness.unclaimed(lease)
        # Its reader closes it. If not, it is forgotten after the lease cap, which no transfer exceeds.
        state.timers.set(Timer.ACCESS_FORGET, access.id.hex(), state.now + state.limits.lease_cap_s)

    def view(self, lease: Lease) -> LeaseView:
        """Returns the lease as it is now."""
        now = self._state.now
        return LeaseView(
            id=lease.id,
            state=lease.state,
            request_id=lease.request_id,
            transfer_id=lease.transfer_id,
            ttl_s=lease.last_ttl_s,
            remaining_s=max(lease.deadline - now, 0.0) if lease.live else 0.0,
            soft_in_s=self._firmness.soft_in_s(lease) if lease.live else None,
            cap_remaining_s=max(lease.cap - now, 0.0) if lease.live else 0.0,
            age_s=now - lease.granted,
            blocks=lease.blocks,
            token_count=lease.content.tokens,
            consumers=lease.consumers,
            consumers_done=lease.done,
            open_accesses=len(lease.accesses),
            renewals=lease.renewals,
            trace=lease.trace,
            labels=lease.labels,
        )

    def preview(self, lease: Lease) -> LeaseView:
        """Returns the lease that would be granted. It has no id, because it does not exist."""
        return replace(self.view(lease), id="", transfer_id="", blocks=no_blocks(len(lease.blocks)))

    def _close(self, lease: Lease, reason: Reason) -> None:
        """Removes everything that depends on an ended lease."""
        state = self._state
        state.timers.clear(Timer.LEASE, lease.id)
        state.mirrors.drop(lease)
        self._firmness.ended(lease)
        for access_id in list(lease.accesses):
            self.outdate(state.accesses[access_id], reason)
        state.pins.drop(lease.id, PinKind.LEASE)
        state.leases.ended(lease)

    def _check(self, event: FinishedBlocks) -> tuple[Blocks, ContentId, float]:
        """Checks a hand-over completely before anything changes."""
        state = self._state
        state.check_open()
        check_transfer_key(event.key)
        if not event.last or event.layers or event.part_epoch or event.failure:
            raise PreconditionFailed(Reason.WAITS_FOR_MISMATCH, "for READERS a hand-over is exactly one part")
        ttl_s = granted_ttl(event.ttl_s, state.limits)
        if event.tenant and tenant_of(event.call.principal) not in ("", event.tenant):
            raise invalid("for_readers.tenant" if event.transfer else "tenant", "is the caller's own, or left out")
        if not any(len(ids) for _, ids in event.blocks):
            raise PreconditionFailed(Reason.EMPTY_FINISH, "there are no blocks to hand over")
        if event.content is None:
            raise InvalidRequest(Reason.CONTENT_REQUIRED, "a hand-over states what its blocks hold")
        blocks = state.resolve(event.blocks, "for_readers.blocks" if event.transfer else "blocks")
        check_covers(blocks, event.content, state.pool.pool.groups)
        state.check_owned(blocks, event.allocation_id, event.call.principal)
        state.check_key(event.key)
        if event.transfer:
            self._check_alone(event.key)
            state.check_room()
        state.pins.check_free_for(PinKind.LEASE, blocks)
        return blocks, event.content, ttl_s

    def _check_alone(self, key: bytes) -> None:
        """Raises for a transfer key in use: AlreadyExists (TRANSFER_EXISTS), or PreconditionFailed (WAITS_FOR_MISMATCH)
        for a push.
        """
        for transfer in self._state.transfers.with_key(key):
            if transfer.direction is Direction.SEND and not transfer.over:
                lease = self._state.leases.find(transfer.lease_id)
                if lease is None or lease.pushed:
                    raise PreconditionFailed(Reason.WAITS_FOR_MISMATCH, "blocks are pushed under this transfer key")
                raise AlreadyExists(Reason.TRANSFER_EXISTS, "blocks were handed over under this transfer key already")

    def _token(self, lease: Lease, key: bytes) -> bytes:
        pool = self._state.pool
        claims = Claims(
            AccessKind.READ, pool.engine_id, self._state.incarnation, pool.address, lease.id, key, lease.ttl_s,
            sum(len(ids) for ids in lease.blocks), lease.content.tokens, lease.on_abort,
            tenant=lease.tenant, bound_to=lease.bound_to, request_time_us=lease.request_time_us,
        )  # fmt: skip
        return mint(claims, self._state.grant_key)

    def _send(self, lease: Lease, event: FinishedBlocks) -> Transfer:
        state = self._state
        transfer = state.create(
            event.call,
            direction=Direction.SEND,
            key=event.key,
            tenant=lease.tenant,
            request_id=event.request_id,
            lease_id=lease.id,
            waiting_for="readers",
            use_tokens=lease.content.tokens,
            blocks=sum(len(ids) for ids in lease.blocks),
            nbytes=state.bytes_of([len(ids) for ids in lease.blocks]),
            consumers=lease.consumers,
            priority=event.priority,
        )
        lease.transfer_id = transfer.id
        return transfer

    def _would_free(self, lease: Lease) -> Blocks:
        """Returns the blocks that the lease's end would free: those pinned only by the lease and what ends with it."""
        state = self._state
        owners = [(lease.id, PinKind.LEASE)]
        owners += [(state.accesses[access_id].owner, PinKind.ACCESS) for access_id in lease.accesses]
        push = state.pushes.find(lease.transfer_id)
        if push is not None:
            moves = push.registrations.values()
            owners += [(move.name, PinKind.ACCESS) for move in moves if not move.postings]
        return state.pins.unpinned_without(owners, lease.blocks)

    def _end_send(self, lease: Lease, failure: Failure | None, *, cancelled: bool) -> None:
        state = self._state
        transfer = state.transfers.get(lease.transfer_id)
        push = state.pushes.find(transfer.id)
        held = push is not None and push.reads(state.pins)
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
