"""The pool of blocks where this server manages it: AllocateBlocks and FreeBlocks."""

from kvgrpc.core.actions import Allocated, Freed
from kvgrpc.core.events import AllocateBlocks, FreeBlocks
from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.allocator import RETRY_DELAY_S
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.values.descriptors import Blocks
from kvgrpc.core.values.ids import format_incarnation
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.core.values.limits import granted_ttl
from kvgrpc.errors import Exhausted, InvalidRequest, NotFound, OutOfRange, PreconditionFailed, Reason


class Allocations:
    """Allocation calls."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._made = 0

    def allocate(self, event: AllocateBlocks) -> None:
        """AllocateBlocks: takes blocks, or renews the TTL of an earlier allocation."""
        state = self._state
        self._check_kind()
        ttl_s = None if event.ttl_s is None else granted_ttl(event.ttl_s, state.limits)
        if event.allocation_id:
            allocation_id, blocks = event.allocation_id, self._find(event.allocation_id)
        else:
            state.check_open()
            counts = self._check_counts(event)
            if len(state.allocator) >= state.limits.allocations:
                raise Exhausted(
                    Reason.LIMIT_EXCEEDED,
                    f"{len(state.allocator)} allocations hold blocks here; FreeBlocks, or the end of a TTL, makes room",
                    retry_delay_s=RETRY_DELAY_S,
                )
            allocation_id = f"b-{format_incarnation(state.incarnation)}-{self._made + 1}"
            blocks = state.allocator.allocate(allocation_id, counts)
            self._made += 1
        due = state.timers.when(Timer.ALLOCATION, allocation_id)
        if ttl_s is not None:
            due = max(state.now + ttl_s, due or 0.0)
            state.timers.set(Timer.ALLOCATION, allocation_id, due)
        state.reply(event.call.id, Allocated(allocation_id, blocks, None if due is None else due - state.now))

    def free(self, event: FreeBlocks) -> None:
        """FreeBlocks: all or none; pinned ones come free at their last unpin."""
        self._check_kind()
        blocks = self._state.resolve(event.blocks, "blocks")
        free, ended = self._state.allocator.free(blocks)
        for allocation_id in ended:
            self._state.timers.clear(Timer.ALLOCATION, allocation_id)
        self._state.reply(event.call.id, Freed(free))

    def due(self, allocation_id: str) -> None:
        """An allocation's TTL is over."""
        self._state.allocator.free_allocation(allocation_id)

    def _check_kind(self) -> None:
        if self._state.pool.pool_kind is not PoolKind.SERVER_MANAGED:
            raise PreconditionFailed(
                Reason.POOL_KIND_MISMATCH, "the engine's own block manager gives out the blocks of this pool"
            )

    def _check_counts(self, event: AllocateBlocks) -> dict[int, int]:
        groups = self._state.pool.pool.groups
        counts = dict(event.counts)
        if len(counts) != len(event.counts) or any(not 0 <= g < len(groups) for g in counts):
            raise InvalidRequest(
                Reason.GROUP_MISMATCH, f"counts names each of the groups 0 to {len(groups) - 1} at most once"
            )
        total = sum(counts.values())
        if total <= 0 or min(counts.values()) < 0:
            raise InvalidRequest(Reason.INVALID_FIELD, "counts asks for no block")
        if total > self._state.limits.blocks_per_request:
            raise OutOfRange(
                Reason.LIMIT_EXCEEDED,
                f"{total} blocks in one request; the limit is {self._state.limits.blocks_per_request}",
            )
        return counts

    def _find(self, allocation_id: str) -> Blocks:
        blocks = self._state.allocator.find(allocation_id)
        if blocks is None:
            raise NotFound(Reason.BLOCK_NOT_ALLOCATED, f"no allocation {allocation_id} here")
        return blocks
