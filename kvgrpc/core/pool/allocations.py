"""The pool of blocks where this server manages it: AllocateBlocks and FreeBlocks."""

from collections.abc import Collection

from kvgrpc.core.actions import Allocated, Freed
from kvgrpc.core.events import AllocateBlocks, FreeBlocks
from kvgrpc.core.state import ENGINE, NodeState
from kvgrpc.core.tables.allocator import RETRY_DELAY_S
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.values.descriptors import Blocks
from kvgrpc.core.values.ids import format_incarnation
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.core.values.limits import granted_ttl
from kvgrpc.errors import (
    Exhausted,
    FieldViolation,
    InvalidRequest,
    NotFound,
    OutOfRange,
    PreconditionFailed,
    Reason,
    invalid,
)


class Allocations:
    """Allocation calls."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._made = 0

    def allocate(self, event: AllocateBlocks) -> None:
        """AllocateBlocks: takes blocks, or renews the TTL of an earlier allocation."""
        self.check_kind()
        if event.no_expiry and event.ttl_s is not None:
            raise invalid("no_expiry", "is said in place of a ttl, not with it")
        if event.allocation_id:
            self._renew(event)
        else:
            self._take(event)

    def free(self, event: FreeBlocks) -> None:
        """FreeBlocks: all or none; pinned ones come free at their last unpin."""
        state = self._state
        self.check_kind()
        if event.allocation_id and not event.blocks:
            blocks = self.find(event.allocation_id)
        else:
            blocks = state.resolve(event.blocks, "blocks")
            state.allocator.check_allocated(blocks, event.allocation_id)
        if not event.validate_only:
            self._give_back(blocks)
        free = tuple(state.pins.unpinned(group, ids) for group, ids in enumerate(blocks))
        state.reply(event.call.id, Freed(free))

    def free_all(self, allocation_ids: Collection[str]) -> None:
        """Gives back what is left of these allocations, as by FreeBlocks; those that are gone are passed over."""
        for allocation_id in dict.fromkeys(allocation_ids):
            blocks = self._state.allocator.find(allocation_id)
            if blocks is not None:
                self._give_back(blocks)

    def find(self, allocation_id: str) -> Blocks:
        """What an allocation still holds. Raises NotFound (BLOCK_NOT_ALLOCATED)."""
        blocks = self._state.allocator.find(allocation_id)
        if blocks is None:
            raise NotFound(
                Reason.BLOCK_NOT_ALLOCATED, f"no allocation {allocation_id} here: it was freed, or has ended"
            )
        return blocks

    def due(self, allocation_id: str) -> None:
        """An allocation's TTL is over."""
        self._state.allocator.free_allocation(allocation_id)

    def _take(self, event: AllocateBlocks) -> None:
        state = self._state
        ttl_s = self._ttl_s(event)
        state.check_open()
        counts = self._check_counts(event)
        if len(state.allocator) >= state.limits.allocations:
            raise Exhausted(
                Reason.LIMIT_EXCEEDED,
                f"{len(state.allocator)} allocations hold blocks here; FreeBlocks, or the end of a TTL, makes room",
                retry_delay_s=RETRY_DELAY_S,
                metadata={"limit": str(state.limits.allocations)},
            )
        taken = state.allocator.choose(counts)
        if event.validate_only:
            state.reply(event.call.id, Allocated("", (), ttl_s))
            return
        self._made += 1
        allocation_id = f"b-{format_incarnation(state.incarnation)}-{self._made}"
        state.allocator.take(allocation_id, taken)
        if ttl_s is not None:
            state.timers.set(Timer.ALLOCATION, allocation_id, state.now + ttl_s)
        state.reply(event.call.id, Allocated(allocation_id, taken, ttl_s))

    def _renew(self, event: AllocateBlocks) -> None:
        """It never shortens: what has no TTL gets none."""
        state = self._state
        ttl_s = self._ttl_s(event)
        allocation_id, blocks = event.allocation_id, self.find(event.allocation_id)
        if event.counts:
            raise invalid("group_block_counts", "is empty where an allocation is renewed: it gets no more blocks")
        due = state.timers.when(Timer.ALLOCATION, allocation_id)
        if event.no_expiry:
            due = None
        elif due is not None and ttl_s is not None:
            due = max(state.now + ttl_s, due)
        left_s = None if due is None else due - state.now
        if event.validate_only:
            state.reply(event.call.id, Allocated("", (), left_s))
            return
        if due is None:
            state.timers.clear(Timer.ALLOCATION, allocation_id)
        else:
            state.timers.set(Timer.ALLOCATION, allocation_id, due)
        state.reply(event.call.id, Allocated(allocation_id, blocks, left_s))

    def _ttl_s(self, event: AllocateBlocks) -> float | None:
        """The TTL that is granted; None: it has none."""
        limits = self._state.limits
        if event.ttl_s is not None:
            return granted_ttl(event.ttl_s, limits)
        return None if event.no_expiry or event.call.principal == ENGINE else limits.allocation_ttl_s

    def _give_back(self, blocks: Blocks) -> None:
        for allocation_id in self._state.allocator.free(blocks):
            self._state.timers.clear(Timer.ALLOCATION, allocation_id)

    def check_kind(self) -> None:
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
            raise invalid("group_block_counts", "asks for no block")
        most = self._state.limits.blocks_per_request
        if total > most:
            raise OutOfRange(
                Reason.LIMIT_EXCEEDED,
                f"{total} blocks in one request; the limit is {most}",
                metadata={"limit": str(most)},
            )
        for row, (group, count) in enumerate(event.counts):
            if count > groups[group].blocks:
                raise OutOfRange(
                    Reason.LIMIT_EXCEEDED,
                    f"{count} blocks of group {group} were asked for, which has {groups[group].blocks} in all",
                    violations=(
                        FieldViolation(f"group_block_counts[{row}]", f"at most {groups[group].blocks} blocks"),
                    ),
                    metadata={"group": str(group), "block_count": str(groups[group].blocks)},
                )
        return counts
