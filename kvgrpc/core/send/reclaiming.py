"""Reclaiming: the owner of a pool takes blocks back from leases that are soft.

All or nothing: where all soft leases together would not set enough blocks free, none is ended, because that would cost
their readers a computation and help nobody. What is ended is the oldest ones, without those that are not needed beside
younger ones. It ends in the event that asks for it, and since nobody has claimed it, its blocks are free at once.
"""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from kvgrpc.core.actions import Later, Reclaimed, ReclaimedLease
from kvgrpc.core.events import ReclaimBlocks
from kvgrpc.core.send.hand_overs import HandOvers
from kvgrpc.core.state import ENGINE, NodeState
from kvgrpc.core.state.block_counts import check_counts
from kvgrpc.core.tables.leases import Lease, LeaseState
from kvgrpc.core.tables.pins import Counts
from kvgrpc.core.values.descriptors import Blocks
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.errors import PreconditionFailed, Reason

LATER_MAX = 16
"""Leases that an answer names which would be soft later."""
LEASES_LISTED_MAX = 1_000
"""Ended leases that an answer names."""


@dataclass(frozen=True, eq=False)
class Plan:
    """Leases whose end sets enough blocks free, oldest first, and those blocks."""

    leases: tuple[Lease, ...]
    freed: Blocks


class Reclaiming:
    """ReclaimBlocks, and AllocateBlocks that may reclaim."""

    def __init__(self, state: NodeState, hand_overs: HandOvers) -> None:
        self._state = state
        self._hand_overs = hand_overs

    def reclaim(self, event: ReclaimBlocks) -> None:
        """ReclaimBlocks: enough of the soft leases end, or none."""
        state = self._state
        if event.call.principal != ENGINE and state.pool.pool_kind is not PoolKind.SERVER_MANAGED:
            raise PreconditionFailed(
                Reason.POOL_KIND_MISMATCH, "the engine manages this pool: it alone takes its blocks back"
            )
        needed = check_counts(event.counts, state)
        mine = event.call.principal == ENGINE
        plan = self.plan(needed, mine=mine)
        if plan is not None and not event.validate_only:
            self.carry_out(plan)
        leases, freed = (plan.leases, plan.freed) if plan else ((), ())
        rows = tuple(ReclaimedLease(lease.id, lease.transfer_id, lease.request_id) for lease in leases)
        answer = Reclaimed(plan is not None, rows[:LEASES_LISTED_MAX], len(rows), freed, self.later(mine=mine))
        state.reply(event.call.id, answer)

    def plan(self, needed: Mapping[int, int], *, mine: bool = False) -> Plan | None:
        """What to end so that `needed[group]` blocks of each group come free that are not; None where that is not to be
        had. `mine`: also blocks that were given out come free, for the engine that asks knows what else uses them.

        It costs the blocks of the leases that are looked at: those that are ended, and those that are spared since
        younger ones give more.
        """
        pins = self._state.pins
        if any(count > pins.reclaimable(group, given=mine) for group, count in needed.items()):
            return None
        gone, missing = pins.none(), dict(needed)
        looked_at: list[Lease] = []
        with closing(self._state.soft_leases.oldest()) as oldest:
            for lease in oldest:
                if all(count <= 0 for count in missing.values()):
                    break
                looked_at.append(lease)
                _add(gone, lease, 1)
                for group in missing:
                    missing[group] -= pins.free_without(group, lease.blocks[group], gone[group], given=mine).size
        chosen: list[Lease] = []
        for lease in reversed(looked_at):
            lost = {
                group: pins.free_without(group, lease.blocks[group], gone[group], given=mine).size for group in missing
            }
            if all(missing[group] + lost[group] <= 0 for group in missing):
                _add(gone, lease, -1)
                missing = {group: missing[group] + lost[group] for group in missing}
            else:
                chosen.append(lease)
        chosen.reverse()
        return Plan(tuple(chosen), self._freed(chosen, gone, mine=mine))

    def carry_out(self, plan: Plan) -> None:
        """Ends the leases of a plan that was made in this event."""
        self._state.soft_leases.reclaimed += len(plan.leases)
        for lease in plan.leases:
            self._hand_overs.end(lease, LeaseState.RECLAIMED)

    def later(self, *, mine: bool = False) -> tuple[Later, ...]:
        """What will be soft next if nobody claims it, with the blocks that would come free with each lease alone."""
        state = self._state
        rows, alone = [], state.pins.none()
        for lease in state.soft_leases.soonest(LATER_MAX):
            _add(alone, lease, 1)
            free = (
                state.pins.free_without(group, ids, alone[group], given=mine).size
                for group, ids in enumerate(lease.blocks)
            )
            rows.append(Later(lease.firm_until - state.now, tuple(free)))
            _add(alone, lease, -1)
        return tuple(rows)

    def enough_in_s(self, needed: Mapping[int, int]) -> float | None:
        """In how long there might be enough soft blocks, as far as that can be seen; None where it cannot."""
        pins = self._state.pins
        soft = [pins.reclaimable(group) for group in range(len(pins.soft))]
        for row in self.later():
            soft = [have + more for have, more in zip(soft, row.block_counts, strict=True)]
            if all(count <= soft[group] for group, count in needed.items()):
                return row.in_s
        return None

    def _freed(self, leases: list[Lease], gone: list[Counts], *, mine: bool) -> Blocks:
        freed = []
        for group in range(len(gone)):
            listed = [lease.blocks[group] for lease in leases]
            ids = np.unique(np.concatenate([*listed, np.empty(0, dtype=np.int64)]))
            freed.append(self._state.pins.free_without(group, ids, gone[group], given=mine))
        return tuple(freed)


def _add(gone: list[Counts], lease: Lease, step: int) -> None:
    """Its pins are gone, or with -1 are there."""
    for group, ids in enumerate(lease.blocks):
        gone[group][ids] += step
