"""Allocations of blocks from a pool that this server manages: AllocateBlocks and FreeBlocks."""

from collections.abc import Collection

from kvgrpc.core.actions import Allocated, Freed
from kvgrpc.core.events import AllocateBlocks, FreeBlocks, GiveAllocation
from kvgrpc.core.send.reclaims import ReclaimPlan, Reclaims, named_by
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.block_counts import by_space, check_counts
from kvgrpc.core.tables.allocator import ALLOCATION_BYTES, RETRY_DELAY_S, Terms
from kvgrpc.core.tables.ledger import RowKind
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.ids import mint_id
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.core.values.limits import granted_ttl
from kvgrpc.core.values.owners import ENGINE, Thing, ThingKind, Verb, may
from kvgrpc.core.values.request_times import RequestTime
from kvgrpc.errors import Exhausted, NotFound, PreconditionFailed, Reason, full, invalid


class Allocations:
    """The calls that make, renew, give and free allocations."""

    def __init__(self, state: NodeState, reclaims: Reclaims) -> None:
        self._state = state
        self._reclaims = reclaims
        self._made = 0

    def allocate(self, event: AllocateBlocks) -> None:
        """Handles AllocateBlocks: takes blocks, or renews the TTL of an earlier allocation."""
        self.check_kind()
        if event.no_expiry and event.ttl_s is not None:
            raise invalid("no_expiry", "is said in place of a ttl, not with it")
        if event.allocation_id:
            self._renew(event)
        else:
            self._take(event)

    def free(self, event: FreeBlocks) -> None:
        """Handles FreeBlocks: frees all blocks or none. Pinned blocks come free at their last unpin."""
        state = self._state
        self.check_kind()
        whole, caller = event.allocation_id if not event.blocks else "", event.call.principal
        if whole:
            blocks = self.find(whole, caller, Verb.USE)
        else:
            blocks = state.pool.resolve(event.blocks, "blocks")
            state.pool.allocator.check_usable(blocks, event.allocation_id, caller)
        if not event.validate_only and whole:
            self._give_all_back(whole)
        elif not event.validate_only:
            self._give_back(blocks)
        free = tuple([state.pool.pins.unpinned(group, ids) for group, ids in enumerate(blocks)])
        state.reply(event.call.id, Freed(free))

    def free_all(self, allocation_ids: Collection[str], caller: str) -> None:
        """Frees the rest of these allocations, as FreeBlocks does. Allocations that are gone, or not the caller's, are
        skipped.
        """
        for allocation_id in dict.fromkeys(allocation_ids):
            if self._may(caller, Verb.USE, allocation_id):
                self._give_all_back(allocation_id)

    def give(self, event: GiveAllocation) -> None:
        """Handles GiveAllocation: the allocation has another owner from now on."""
        blocks = self.find(event.allocation_id, event.call.principal, Verb.USE)
        self._state.pool.allocator.give(event.allocation_id, event.owner)
        self._state.reply(event.call.id, Allocated(event.allocation_id, blocks, None))

    def find(self, allocation_id: str, caller: str, verb: Verb) -> Blocks:
        """Returns the blocks that an allocation still holds. Raises NotFound (BLOCK_NOT_ALLOCATED), also if the caller
        may not use it this way.
        """
        blocks = self._state.pool.allocator.find(allocation_id)
        if blocks is None or not self._may(caller, verb, allocation_id):
            raise NotFound(
                Reason.BLOCK_NOT_ALLOCATED, f"no allocation {allocation_id} here: it was freed, or has ended"
            )
        return blocks

    def due(self, allocation_id: str) -> None:
        """Frees an allocation whose TTL is over."""
        self._state.pool.allocator.free_allocation(allocation_id)

    def _take(self, event: AllocateBlocks) -> None:
        state = self._state
        ttl_s = self._ttl_s(event)
        state.pool.check_open()
        counts = check_counts(event.counts, state)
        if (made := len(state.pool.allocator)) >= state.limits.allocations:
            text = f"{made} allocations hold blocks here; FreeBlocks, or the end of a TTL, makes room"
            raise full(text, state.limits.allocations, RETRY_DELAY_S)
        payer = event.call.payer
        state.ledger.check_rows(RowKind.ALLOCATION, payer, state.limits.allocations)
        state.ledger.check(payer, ALLOCATION_BYTES)
        by = None if event.by is None else named_by(event)
        try:
            plan = self._plan(counts, by, event.call.principal) if event.reclaim else None
            taken = state.pool.allocator.choose(counts) if plan is None else ()
        except Exhausted:
            if not event.validate_only:
                self._reclaims.asked(by, counts, enough=False)
            raise
        if event.validate_only:
            state.reply(event.call.id, Allocated("", (), ttl_s))
            return
        if by is not None:
            self._reclaims.asked(by, counts, enough=True)
        if plan is not None:
            self._reclaims.carry_out(plan)
            taken = state.pool.allocator.choose(counts)
        self._made += 1
        allocation_id = mint_id(state.life.secret, state.life.incarnation, "blocks", "lead", self._made)
        terms = Terms(event.call.principal, state.now, event.request_id, event.label)
        state.pool.allocator.take(allocation_id, taken, terms, payer)
        if ttl_s is not None:
            state.timers.set(Timer.ALLOCATION, allocation_id, state.now + ttl_s)
        state.reply(event.call.id, Allocated(allocation_id, taken, ttl_s))

    def _plan(self, counts: dict[int, int], by: RequestTime | None, caller: str) -> ReclaimPlan | None:
        """Returns what to reclaim for the caller; None if nothing is missing. Raises Exhausted (POOL_EXHAUSTED)."""
        state = self._state
        missing = {space: count - state.pool.pins.free[space] for space, count in by_space(counts, state).items()}
        missing = {space: count for space, count in missing.items() if count > 0}
        plan = self._reclaims.plan(missing, caller, by=by) if missing else None
        if missing and plan is None:
            try:
                state.pool.allocator.choose(counts)
            except Exhausted as error:
                space = state.pool.pins.spaces[int(error.metadata["group"])]
                error.metadata["soft_block_count"] = str(state.pool.pins.reclaimable(space))
                error.retry_delay_s = self._reclaims.enough_in_s(missing) or RETRY_DELAY_S
                raise
        return plan

    def _renew(self, event: AllocateBlocks) -> None:
        """Renews an allocation. Never shortens its time: an allocation without a TTL gets none."""
        state = self._state
        ttl_s = self._ttl_s(event)
        allocation_id, caller = event.allocation_id, event.call.principal
        blocks = self.find(allocation_id, caller, Verb.RENEW)
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
        """Returns the granted TTL in seconds; None: no TTL."""
        limits = self._state.limits
        if event.ttl_s is not None:
            return granted_ttl(event.ttl_s, limits)
        return None if event.no_expiry or event.call.principal == ENGINE else limits.allocation_ttl_s

    def _may(self, caller: str, verb: Verb, allocation_id: str) -> bool:
        """Returns whether the caller may do this; False also for an allocation that does not exist."""
        owner = self._state.pool.allocator.owner(allocation_id)
        return owner is not None and may(caller, verb, Thing(ThingKind.ALLOCATION, owner))

    def _give_back(self, blocks: Blocks) -> None:
        for allocation_id in self._state.pool.allocator.free(blocks):
            self._state.timers.clear(Timer.ALLOCATION, allocation_id)

    def _give_all_back(self, allocation_id: str) -> None:
        self._state.pool.allocator.free_allocation(allocation_id)
        self._state.timers.clear(Timer.ALLOCATION, allocation_id)

    def check_kind(self) -> None:
        if self._state.life.engine.pool_kind is not PoolKind.SERVER_MANAGED:
            raise PreconditionFailed(
                Reason.POOL_KIND_MISMATCH, "the engine's own block manager gives out the blocks of this pool"
            )
