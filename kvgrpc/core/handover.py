"""Handing blocks over: FinishedBlocks for readers, GrantLease, and the life of a lease.

A hand-over pins its blocks under a lease; the SEND transfer beside it is what people follow. Whatever ends the lease
ends, in the same step, its pins, the accesses that stand on it, and the transfer.
"""

from kvgrpc.core.accesses import AccessState
from kvgrpc.core.actions import (
    BlocksReturned,
    Failed,
    HandedOver,
    LeaseView,
    Released,
    Renewed,
)
from kvgrpc.core.content import Content
from kvgrpc.core.events import FinishedBlocks, LeaseRef, ReleaseLease, RenewLeases
from kvgrpc.core.grants import Access as AccessKind
from kvgrpc.core.grants import Claims, mint, verify
from kvgrpc.core.ids import TRANSFER_KEY_BYTES_MIN, mint_lease_id
from kvgrpc.core.leases import END_REASON, Lease, LeaseState, ended_error
from kvgrpc.core.limits import granted_ttl
from kvgrpc.core.pins import Blocks, PinKind
from kvgrpc.core.state import ENGINE, NodeState
from kvgrpc.core.timers import Timer
from kvgrpc.core.transfers import Direction, Disposition, Failure, Next, Side, State, Transfer
from kvgrpc.errors import (
    AlreadyExists,
    Exhausted,
    InvalidRequest,
    KVGrpcError,
    OutOfRange,
    PreconditionFailed,
    Reason,
)


class HandOver:
    """Leases of this engine."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._minted = 0

    def finish(self, event: FinishedBlocks) -> Lease | None:
        """FinishedBlocks (READERS) and GrantLease. Returns the new lease, None for validate_only."""
        state = self._state
        try:
            blocks, ttl_s = self._check(event)
        except KVGrpcError:
            if event.lease_id and event.call.principal == ENGINE:
                state.refused_leases.add(event.lease_id)
            raise
        assert event.content is not None
        lease = Lease(
            id=event.lease_id or self._mint_id(),
            blocks=blocks,
            content=event.content,
            granted=state.now,
            ttl_s=ttl_s,
            deadline=state.now + ttl_s,
            cap=state.now + state.limits.lease_cap_s,
            consumers=event.consumers,
            on_abort=event.on_abort,
            owner=event.call.principal,
            request_id=event.request_id,
            trace=event.call.trace,
            after_step=event.after_step,
            labels=event.labels,
        )
        token = self._token(lease, event.key)
        state.pins.check_free_for(PinKind.LEASE, blocks)
        if event.validate_only:
            state.reply(event.call.id, HandedOver(self.view(lease), None, b""))
            return None
        state.pins.add(lease.id, PinKind.LEASE, blocks, state.now)
        state.leases.add(lease)
        state.timers.set(Timer.LEASE, lease.id, lease.deadline)
        transfer = self._send(lease, event) if event.transfer else None
        state.reply(event.call.id, HandedOver(self.view(lease), transfer, token))
        return lease

    def renew(self, event: RenewLeases) -> None:
        """RenewLeases: one row for each lease asked for; a dead one is a row."""
        state = self._state
        if len(event.leases) > state.limits.renewals_per_call:
            raise OutOfRange(Reason.LIMIT_EXCEEDED, f"at most {state.limits.renewals_per_call} leases in one call")
        ttl_s = None if event.ttl_s is None else granted_ttl(event.ttl_s, state.limits)
        rows = tuple(self._renew_one(ref, ttl_s) for ref in event.leases)
        state.reply(event.call.id, Renewed(rows))

    def release(self, event: ReleaseLease) -> None:
        """ReleaseLease by owner or router: ends the lease. An ended lease stays as it ended."""
        state = self._state
        lease = self.find(event.lease)
        freed: Blocks = ()
        if lease.live:
            self.end(lease, LeaseState.RELEASED)
            freed = tuple(state.pins.unpinned(group, ids) for group, ids in enumerate(lease.blocks))
        state.reply(event.call.id, Released(self.view(lease), freed))

    def find(self, ref: LeaseRef) -> Lease:
        """The lease, live or ended. Raises NotFound, or the grant's errors."""
        state = self._state
        if not ref.token:
            return state.leases.get(ref.lease_id)
        claims = verify(ref.token, state.grant_key, state.pool.engine_id, state.incarnation, AccessKind.READ)
        return state.leases.get(claims.lease_id)

    def due(self, lease_id: str) -> None:
        """A lease's deadline: its time is over, or it was renewed meanwhile."""
        lease = self._state.leases.get(lease_id)
        if lease.deadline > self._state.now:
            self._state.timers.set(Timer.LEASE, lease_id, lease.deadline)
        else:
            self.end(lease, LeaseState.EXPIRED)

    def consumer_done(self, lease: Lease, consumer: str, *, received: bool) -> None:
        """Counts a consumer by identity; the last one declared ends the lease."""
        if not lease.live:
            return
        lease.done.add(consumer)
        if received:
            lease.received.add(consumer)
        if len(lease.done) >= lease.consumers:
            self.end(lease, LeaseState.DONE)
        elif lease.transfer_id:
            self._state.change(lease.transfer_id, consumers_done=len(lease.done))

    def end(self, lease: Lease, how: LeaseState, failure: Failure | None = None) -> None:
        """Ends a live lease: pins, accesses and transfer with it. `failure` overrides the transfer's."""
        state = self._state
        lease.end(how)
        state.timers.clear(Timer.LEASE, lease.id)
        for access_id in lease.accesses:
            access = state.accesses[access_id]
            if access.state is AccessState.OPEN:
                access.move(AccessState.STALE)
                access.stale = END_REASON[how]
                state.pins.drop(access.owner, PinKind.ACCESS)
        state.pins.drop(lease.id, PinKind.LEASE)
        state.leases.ended(lease)
        if lease.transfer_id:
            self._end_send(lease, failure)

    def view(self, lease: Lease) -> LeaseView:
        """The lease as it is now."""
        now = self._state.now
        return LeaseView(
            id=lease.id,
            state=lease.state,
            request_id=lease.request_id,
            transfer_id=lease.transfer_id,
            ttl_s=lease.ttl_s,
            remaining_s=max(lease.deadline - now, 0.0) if lease.live else 0.0,
            cap_remaining_s=max(lease.cap - now, 0.0) if lease.live else 0.0,
            age_s=now - lease.granted,
            blocks=lease.blocks,
            token_count=lease.content.tokens,
            consumers=lease.consumers,
            consumers_done=len(lease.done),
            open_accesses=len(lease.accesses),
            renewals=lease.renewals,
            trace=lease.trace,
            labels=lease.labels,
        )

    def _check(self, event: FinishedBlocks) -> tuple[Blocks, float]:
        """Everything that can be wrong with a hand-over, before anything changes."""
        state = self._state
        pool = state.pool.pool
        if len(event.key) < TRANSFER_KEY_BYTES_MIN:
            raise InvalidRequest(
                Reason.INVALID_FIELD, f"transfer_key needs at least {TRANSFER_KEY_BYTES_MIN} random bytes"
            )
        ttl_s = granted_ttl(event.ttl_s, state.limits)
        if not any(len(ids) for _, ids in event.blocks):
            raise PreconditionFailed(Reason.EMPTY_FINISH, "there are no blocks to hand over")
        if event.content is None:
            raise InvalidRequest(Reason.CONTENT_REQUIRED, "a hand-over states what its blocks hold")
        blocks = state.resolve(event.blocks, "blocks")
        check_covers(blocks, event.content, [g.block_tokens for g in pool.groups])
        state.check_owned(blocks)
        state.check_key(event.key)
        if event.transfer and any(
            t.direction is Direction.SEND and not t.over for t in state.transfers.with_key(event.key)
        ):
            raise AlreadyExists(Reason.TRANSFER_EXISTS, "blocks were handed over under this transfer key already")
        if event.lease_id and state.leases.known(event.lease_id):
            raise AlreadyExists(Reason.TRANSFER_EXISTS, f"lease id {event.lease_id} was used already")
        if len(state.leases) >= state.limits.leases or state.transfers.live >= state.limits.transfers:
            raise Exhausted(Reason.QUEUE_FULL, "too many live leases or transfers", retry_delay_s=1.0)
        return blocks, ttl_s

    def _mint_id(self) -> str:
        self._minted += 1
        return mint_lease_id(self._state.secret, self._state.incarnation, "lead", self._minted)

    def _token(self, lease: Lease, key: bytes) -> bytes:
        pool = self._state.pool
        claims = Claims(
            AccessKind.READ,
            pool.engine_id,
            self._state.incarnation,
            pool.address,
            lease.id,
            key,
            lease.ttl_s,
            sum(len(ids) for ids in lease.blocks),
            lease.content.tokens,
            lease.on_abort,
        )
        return mint(claims, self._state.grant_key)

    def _send(self, lease: Lease, event: FinishedBlocks) -> Transfer:
        state = self._state
        pool = state.pool.pool
        transfer = state.create(
            direction=Direction.SEND,
            key=event.key,
            owner=event.call.principal,
            request_id=event.request_id,
            trace=event.call.trace,
            lease_id=lease.id,
            waiting_for="readers",
            use_tokens=lease.content.tokens,
            blocks=sum(len(ids) for ids in lease.blocks),
            nbytes=state.pool.world_size
            * sum(len(ids) * pool.block_bytes(group) for group, ids in enumerate(lease.blocks)),
            consumers=lease.consumers,
            priority=event.priority,
        )
        lease.transfer_id = transfer.id
        return transfer

    def _renew_one(self, ref: LeaseRef, ttl_s: float | None) -> tuple[float, Reason | None]:
        try:
            lease = self.find(ref)
            if not lease.live:
                raise ended_error(lease.state, lease.id)
        except KVGrpcError as error:
            return 0.0, error.reason
        lease.renew(self._state.now, ttl_s)
        return lease.deadline - self._state.now, None

    def _end_send(self, lease: Lease, failure: Failure | None) -> None:
        state = self._state
        transfer = state.transfers.get(lease.transfer_id)
        end = State.FAILED if failure else _SEND_ENDS[lease.state]
        if lease.state is LeaseState.DONE and not lease.received:
            end = State.CANCELLED
        if end is not State.SUCCEEDED:
            failure = failure or _send_failure(lease)
        state.change(
            transfer.id,
            state=end,
            memory=Disposition.RETURNED,
            failure=failure,
            consumers_done=len(lease.done),
        )
        if failure:
            cancelled = end is State.CANCELLED
            state.tell(lease.owner, Failed(transfer.id, transfer.request_id, failure, cancelled))
        state.tell(lease.owner, BlocksReturned(transfer.id, transfer.request_id))


_SEND_ENDS = {
    LeaseState.DONE: State.SUCCEEDED,
    LeaseState.EXPIRED: State.FAILED,
    LeaseState.RELEASED: State.CANCELLED,
    LeaseState.VOIDED: State.CANCELLED,
}


def _send_failure(lease: Lease) -> Failure:
    messages = {
        LeaseState.DONE: "every consumer dropped it",
        LeaseState.EXPIRED: f"no consumer was done within the lease ({lease.ttl_s:g} s, {lease.renewals} renewals)",
        LeaseState.RELEASED: "the lease was released",
        LeaseState.VOIDED: "the engine took its blocks back",
    }
    reason = Reason.CANCELLED if lease.state is LeaseState.DONE else END_REASON[lease.state]
    return Failure(reason, messages[lease.state], "readers", Side.SOURCE, next=Next.RECOMPUTE)


def check_covers(blocks: Blocks, content: Content, block_tokens: list[int]) -> None:
    """Raises PreconditionFailed (CONTENT_RANGE) unless every group lists exactly the blocks of the content's tokens."""
    for group, (ids, tokens) in enumerate(zip(blocks, block_tokens, strict=True)):
        needed = -(-content.tokens // tokens)
        if len(ids) != needed:
            raise PreconditionFailed(
                Reason.CONTENT_RANGE,
                f"group {group}: {content.tokens} tokens fill {needed} blocks of {tokens}; {len(ids)} are listed",
            )
