"""Reclaiming: the owner of a pool takes blocks back from soft leases.

It is all or nothing. If all soft leases together cannot free enough blocks, none is ended: that would cost their
readers a computation and help nobody. The oldest leases are ended, except those that are not needed beside younger
ones. They end in the event that asks for it. Nobody has claimed them, so their blocks are free at once.

If soft leases are too few for a waiting request, leases that yield to it by `weak_claims` are ended too, those of the
youngest readers first. Their readers are told and compute what they lose.
"""

from collections.abc import Mapping
from contextlib import closing
from itertools import chain

import numpy as np

from kvgrpc.core.actions import BlocksLacking, Later, Reclaimed, ReclaimedLease
from kvgrpc.core.events import AllocateBlocks, ReclaimBlocks
from kvgrpc.core.moves.pending_closes import PendingCloses
from kvgrpc.core.send.leases import Leases
from kvgrpc.core.send.weak_claims import WeakClaims
from kvgrpc.core.state import NodeState
from kvgrpc.core.state.block_counts import by_space, check_counts
from kvgrpc.core.tables.leases import Lease, LeaseState
from kvgrpc.core.tables.pins import Counts, PinKind
from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.core.values.owners import ENGINE_SIDE, Thing, ThingKind, Verb, may
from kvgrpc.core.values.records import dataclass
from kvgrpc.core.values.request_times import RequestTime, heard
from kvgrpc.errors import PreconditionFailed, Reason

LATER_MAX = 16
"""Maximum number of firm leases that an answer names, with the time when they become soft."""
READERS_TOLD_MAX = 3
"""Maximum number of readers that the log names."""
LEASES_LISTED_MAX = 1_000
"""Maximum number of ended leases that an answer names."""


@dataclass(frozen=True, eq=False)
class ReclaimPlan:
    """Leases whose end frees enough blocks, oldest first, and those blocks."""

    leases: tuple[Lease, ...]
    freed: Blocks
    claimed: int = 0
    """Number of these leases that are weakly claimed."""


def named_by(event: ReclaimBlocks | AllocateBlocks) -> RequestTime | None:
    """Returns the request for which blocks are wanted. Its age is limited to a plausible one."""
    if event.by is None:
        return None
    own = event.call.principal in ENGINE_SIDE
    return event.by._replace(time_us=heard(event.by.time_us, event.call.wall_us, own=own))


class Reclaims:
    """Handles ReclaimBlocks, and AllocateBlocks that may reclaim."""

    def __init__(self, state: NodeState, leases: Leases, weak_claims: WeakClaims, closes: PendingCloses) -> None:
        self._state = state
        self._leases = leases
        self._weak_claims = weak_claims
        self._closes = closes

    def reclaim(self, event: ReclaimBlocks) -> None:
        """Handles ReclaimBlocks: ends enough of the soft leases, or none."""
        state = self._state
        if event.call.principal not in ENGINE_SIDE and state.life.engine.pool_kind is not PoolKind.SERVER_MANAGED:
            raise PreconditionFailed(
                Reason.POOL_KIND_MISMATCH, "the engine manages this pool: it alone takes its blocks back"
            )
        needed = by_space(check_counts(event.counts, state), state)
        mine = event.call.principal in ENGINE_SIDE
        by = named_by(event)
        plan = self.plan(needed, event.call.principal, mine=mine, by=by)
        if plan is not None and not event.validate_only:
            self.carry_out(plan)
        if not event.validate_only:
            self.asked(by, dict(event.counts), enough=plan is not None)
        leases, freed = (plan.leases, plan.freed) if plan else ((), ())
        rows = tuple(ReclaimedLease(lease.id, lease.transfer_id, lease.request_id) for lease in leases)
        later, claimed = self.later(mine=mine), plan.claimed if plan else 0
        answer = Reclaimed(plan is not None, rows[:LEASES_LISTED_MAX], len(rows), freed, later, claimed)
        state.reply(event.call.id, answer)

    def plan(
        self, needed: Mapping[int, int], caller: str, *, mine: bool = False, by: RequestTime | None = None
    ) -> ReclaimPlan | None:
        """Returns the leases that `caller` may end so that `needed[space]` more blocks of each space come free, or None
        when that is impossible. `mine` also counts allocated blocks, because the asking engine knows what else uses
        them. `by` is the request to which weak claims of younger requests yield.

        The cost is linear in the blocks of the leases that are looked at: the ended ones, and those spared because
        younger ones free more.
        """
        pins = self._state.pool.pins
        too_few = any(count > pins.reclaimable(space, given=mine) for space, count in needed.items())
        yielding = self._weak_claims.younger(by) if too_few and by is not None else []
        if too_few and not yielding:
            return None
        gone, missing = pins.none(), dict(needed)
        looked_at: list[Lease] = []
        with closing(self._state.send.soft_leases.oldest()) as oldest:
            for lease in chain(oldest, yielding):
                if all(count <= 0 for count in missing.values()):
                    break
                if not may(caller, Verb.TAKE_BACK, Thing(ThingKind.LEASE, lease.owner)):
                    continue
                looked_at.append(lease)
                self._add(gone, lease, 1)
                sets_free = self._sets_free(lease, gone, mine=mine)
                missing = {space: count - sets_free[space] for space, count in missing.items()}
        if any(count > 0 for count in missing.values()):
            return None
        chosen: list[Lease] = []
        for lease in reversed(looked_at):
            lost = self._sets_free(lease, gone, mine=mine)
            without = {space: count + lost[space] for space, count in missing.items()}
            if all(count <= 0 for count in without.values()):
                self._add(gone, lease, -1)
                missing = without
            else:
                chosen.append(lease)
        chosen.reverse()
        claimed = sum(lease.id not in self._state.send.soft_leases for lease in chosen)
        return ReclaimPlan(tuple(chosen), self._freed(chosen, gone, mine=mine), claimed)

    def carry_out(self, plan: ReclaimPlan) -> None:
        """Ends the leases of a plan that was made in this event."""
        state = self._state
        state.send.soft_leases.reclaimed += len(plan.leases)
        state.send.soft_leases.reclaimed_claims += plan.claimed
        for lease in plan.leases:
            readers = [state.access.rows[access_id] for access_id in lease.accesses]
            lease.yielded = lease.id not in state.send.soft_leases
            self._leases.end(lease, LeaseState.RECLAIMED)
            for access in readers:
                self._closes.reader_lost(access, "an older request needed its blocks", lease.trace)

    def asked(self, by: RequestTime | None, counts: Mapping[int, int], *, enough: bool) -> None:
        """Records that blocks were requested in the name of a request. Logs at intervals which readers it waits for."""
        state = self._state
        state.send.lacking.asked(by, counts, state.now, enough=enough)
        if by is None or enough:
            return
        readers = [
            (access.consumer, access.opening.request_id, sum(map(len, lease.blocks)))
            for lease, access in self._weak_claims.waiting()
        ]
        if readers and state.send.lacking.tells(state.now):
            shown = tuple(readers[:READERS_TOLD_MAX])
            state.emit(BlocksLacking(by.request_id, sum(counts.values()), shown, len(readers)))

    def later(self, *, mine: bool = False) -> tuple[Later, ...]:
        """Returns the leases that become soft next if nobody claims them, each with the blocks that it alone would
        free.
        """
        state = self._state
        rows, alone = [], state.pool.pins.none()
        for lease in state.send.soft_leases.soonest(LATER_MAX):
            self._add(alone, lease, 1)
            sets_free = self._sets_free(lease, alone, mine=mine)
            rows.append(
                Later(lease.firm_until - state.now, tuple(sets_free[space] for space in state.pool.pins.spaces))
            )
            self._add(alone, lease, -1)
        return tuple(rows)

    def enough_in_s(self, needed: Mapping[int, int]) -> float | None:
        """Returns the seconds until enough blocks may be soft, or None when that cannot be foreseen."""
        pins = self._state.pool.pins
        missing = {space: count - pins.reclaimable(space) for space, count in needed.items()}
        for row in self.later():
            missing = {space: count - row.block_counts[pins.spaces.index(space)] for space, count in missing.items()}
            if all(count <= 0 for count in missing.values()):
                return row.in_s
        return None

    def _sets_free(self, lease: Lease, gone: list[Counts], *, mine: bool) -> list[int]:
        """Returns how many blocks of each space the lease's end would free, if all leases in `gone` had ended."""
        pins = self._state.pool.pins
        counts = [0] * len(pins.soft)
        for group, (space, ids) in enumerate(zip(pins.spaces, lease.blocks, strict=True)):
            counts[space] += pins.free_without(group, ids, gone[group], given=mine).size
        return counts

    def _freed(self, leases: list[Lease], gone: list[Counts], *, mine: bool) -> Blocks:
        freed = []
        for group in range(len(gone)):
            listed = [lease.blocks[group] for lease in leases]
            ids = np.unique(np.concatenate([*listed, np.empty(0, dtype=np.int64)]))
            freed.append(self._state.pool.pins.free_without(group, ids, gone[group], given=mine))
        return tuple(freed)

    def _add(self, gone: list[Counts], lease: Lease, step: int) -> None:
        """Adds `step` to the counts in `gone`, for the pins of a lease and its readers."""
        state = self._state
        readers = [state.access.rows[access_id].owner for access_id in lease.accesses]
        for blocks in (lease.blocks, *(state.pool.pins.held(owner, PinKind.ACCESS) for owner in readers)):
            for group, ids in enumerate(blocks):
                gone[group][ids] += step
