"""Handing blocks over: FinishedBlocks for readers, and GrantLease.

A hand-over pins its blocks under a lease. Users follow the SEND transfer beside it.
"""

from kvgrpc.core.actions import HandedOver
from kvgrpc.core.events import FinishedBlocks
from kvgrpc.core.send.findable import check_findable
from kvgrpc.core.send.firmness import Firmness
from kvgrpc.core.send.leases import LEASE_ID_BYTES_MAX, Leases, may_mint, read_grant
from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.leases import Lease
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.tables.transfers import Direction, Transfer
from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.content import ContentId
from kvgrpc.core.values.ids import check_transfer_key
from kvgrpc.core.values.layout import Group
from kvgrpc.core.values.limits import granted_ttl
from kvgrpc.core.values.owners import ENGINE, tenant_of
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


def check_covers(blocks: Blocks, content: ContentId, groups: tuple[Group, ...]) -> None:
    """Raises PreconditionFailed (CONTENT_RANGE) unless every group lists exactly the blocks of the content's tokens."""
    for i, (ids, group) in enumerate(zip(blocks, groups, strict=True)):
        needed = group.blocks_of(content.tokens)
        if len(ids) != needed:
            raise PreconditionFailed(
                Reason.CONTENT_RANGE,
                f"group {i}: {content.tokens} tokens fill {needed} blocks of {group.block_tokens}; "
                f"{len(ids)} are listed",
                metadata={"group": str(i), "block_count": str(needed)},
            )


class HandOvers:
    """The hand-overs of this engine."""

    def __init__(self, state: NodeState, leases: Leases, firmness: Firmness) -> None:
        self._state = state
        self._leases = leases
        self._firmness = firmness

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
        lease = self._leases.new(event, blocks, content, ttl_s)
        counts = list(map(len, blocks))
        token = read_grant(state, lease, event.key)
        if event.validate_only:
            state.reply(event.call.id, self._leases.preview(lease))
            return
        self._leases.add(lease, event)
        if lease.stands_for:
            state.send.leases.keep_others(lease)
        self._firmness.handed_over(lease)
        transfer = self._send(lease, event, counts) if event.transfer else None
        state.reply(event.call.id, HandedOver(lease.snapshot(), self._leases.times(lease), transfer, token))
        state.react.lease_began(lease)

    def _refused(self, event: FinishedBlocks, error: KVGrpcError) -> bool:
        """Returns, after a refusal, whether the lease will never come, and remembers that for waiting openings.

        A client repeats a call that failed for a passing reason. Nothing repeats a call of the engine's session: it has
        already announced the lease and is told that it failed.
        """
        state = self._state
        repeated = event.call.principal != ENGINE and isinstance(error, Exhausted | Unavailable)
        if event.validate_only or not event.lease_id or repeated or not may_mint(state, event):
            return False
        if state.send.leases.known(event.lease_id) or len(event.lease_id) > LEASE_ID_BYTES_MAX:
            return False
        state.tombstones.refuse_lease(event.lease_id, state.now)
        return True

    def _check(self, event: FinishedBlocks) -> tuple[Blocks, ContentId, float]:
        """Checks a hand-over completely before anything changes."""
        state = self._state
        state.pool.check_open()
        check_transfer_key(event.key)
        if not event.last or event.layers or event.part_epoch or event.failure:
            raise PreconditionFailed(Reason.WAITS_FOR_MISMATCH, "for READERS a hand-over is exactly one part")
        ttl_s = granted_ttl(event.ttl_s, state.limits)
        if event.tenant and tenant_of(event.call.principal) not in ("", event.tenant):
            raise invalid("for_readers.tenant" if event.transfer else "tenant", "is the caller's own, or left out")
        if not sum([len(ids) for _, ids in event.blocks]):
            raise PreconditionFailed(Reason.EMPTY_FINISH, "there are no blocks to hand over")
        if event.content is None:
            raise InvalidRequest(Reason.CONTENT_REQUIRED, "a hand-over states what its blocks hold")
        blocks = state.pool.resolve(event.blocks, "for_readers.blocks" if event.transfer else "blocks")
        check_covers(blocks, event.content, state.life.engine.pool.groups)
        if event.findable:
            check_findable(state, event, event.content)
        state.pool.check_owned(blocks, event.allocation_id, event.call.principal)
        state.tombstones.check_key(event.key, tenant=event.tenant or tenant_of(event.call.principal))
        if event.transfer:
            self._check_alone(event.key)
            state.transfers.check_room(event.call.payer)
        state.pool.pins.check_free_for(PinKind.LEASE, blocks)
        return blocks, event.content, ttl_s

    def _check_alone(self, key: bytes) -> None:
        """Raises for a transfer key in use: AlreadyExists (TRANSFER_EXISTS), or PreconditionFailed (WAITS_FOR_MISMATCH)
        for a push.
        """
        for transfer in self._state.transfers.with_key(key):
            if transfer.direction is Direction.SEND and not transfer.over:
                lease = self._state.send.leases.find(transfer.lease_id)
                if lease is None or lease.pushed:
                    raise PreconditionFailed(Reason.WAITS_FOR_MISMATCH, "blocks are pushed under this transfer key")
                raise AlreadyExists(Reason.TRANSFER_EXISTS, "blocks were handed over under this transfer key already")

    def _send(self, lease: Lease, event: FinishedBlocks, counts: list[int]) -> Transfer:
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
            blocks=sum(counts),
            nbytes=state.pool.bytes_of(counts),
            consumers=lease.consumers,
            priority=event.priority,
        )
        lease.transfer_id = transfer.id
        return transfer
