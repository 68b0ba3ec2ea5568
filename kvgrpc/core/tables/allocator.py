"""Allocation of blocks in a SERVER_MANAGED pool.

The allocator knows which blocks were given out, and for which group. The pin table knows which blocks are free. A block
is given out again only when no group of its space has it allocated or pinned. So FreeBlocks on pinned blocks takes
effect at the last unpin.
"""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from kvgrpc.core.tables.ledger import Ledger, RowKind
from kvgrpc.core.tables.pins import PinTable
from kvgrpc.core.values.block_ids import Blocks, Ids, Kept, kept_bytes, pack, unpack
from kvgrpc.core.values.owners import Thing, ThingKind, Verb, may
from kvgrpc.core.values.records import dataclass
from kvgrpc.errors import Exhausted, PreconditionFailed, Reason

RETRY_DELAY_S = 0.1
"""Retry delay in seconds. Blocks come back when a transfer ends, which takes tens of milliseconds."""
ALLOCATION_BYTES = 1_000
"""Estimated bytes of an allocation without its blocks: its deadline and its row in the ledger."""
_NO_NUMBER = -1
"""Number that no allocation has."""


@dataclass(frozen=True)
class Terms:
    """The owner of an allocation, and the terms stated when it was made."""

    owner: str
    """The owning principal."""
    since: float = 0.0
    request_id: str = ""
    label: str = ""


class Allocator:
    """Allocations and their blocks, for the groups of one pool."""

    def __init__(self, blocks: tuple[int, ...], pins: PinTable, ledger: Ledger | None = None) -> None:
        self._ledger = ledger or Ledger()
        self._holder = [np.zeros(n, dtype=np.int64) for n in blocks]
        """For each group: the number of the allocation that holds each block as one of the group, or 0."""
        self._pins = pins
        self._numbers: dict[str, int] = {}
        self._ids: dict[int, str] = {}
        self._left: dict[int, int] = {}
        """Number of blocks that each allocation still holds, at least 1."""
        self._kept: dict[int, tuple[Kept, int]] = {}
        """Listed blocks of each allocation, and their number. Fewer than half of them were given back since. A lookup
        reads this list instead of the whole pool.
        """
        self._terms: dict[int, Terms] = {}
        self._last = 0

    def choose(self, counts: Mapping[int, int]) -> Blocks:
        """Returns `counts[group]` free blocks of each group, all or none, lowest ids first, because long runs coalesce
        best. Two groups of one space never get the same block.

        Raises Exhausted (POOL_EXHAUSTED) with the number of free blocks that a group has left in its space.
        """
        chosen: list[Ids] = []
        spaces = self._pins.spaces
        for group, space in enumerate(spaces):
            wanted, mask = counts.get(group, 0), self._pins.free_mask(group)
            for ids, other in zip(chosen, spaces, strict=False):
                if other == space:
                    mask[ids] = False
            free = np.flatnonzero(mask)
            if len(free) < wanted:
                raise Exhausted(
                    Reason.POOL_EXHAUSTED,
                    f"group {group} has {len(free)} free blocks of {len(mask)}; {wanted} were asked for",
                    retry_delay_s=RETRY_DELAY_S,
                    metadata={"group": str(group), "free_block_count": str(len(free))},
                )
            chosen.append(_first_run(free, wanted))
        return tuple(chosen)

    def take(self, allocation_id: str, blocks: Blocks, terms: Terms, payer: str = "") -> None:
        """Gives these free blocks, at least one, to a new allocation for which `payer` pays."""
        self._last += 1
        self._terms[self._last] = terms
        self._numbers[allocation_id] = self._last
        self._ids[self._last] = allocation_id
        self._left[self._last] = sum(map(len, blocks))
        self._kept[self._last] = pack(blocks), self._left[self._last]
        for group, (holder, ids) in enumerate(zip(self._holder, blocks, strict=True)):
            holder[ids] = self._last
            self._pins.give_out(group, ids)
        self._ledger.keep(RowKind.ALLOCATION, allocation_id, payer, self._kept_bytes(self._last))

    @property
    def kept_bytes(self) -> dict[Hashable, int]:
        """Estimated bytes of each allocation, by id."""
        return {allocation_id: self._kept_bytes(number) for allocation_id, number in self._numbers.items()}

    def __len__(self) -> int:
        """Returns the number of allocations that hold a block."""
        return len(self._numbers)

    def free(self, blocks: Blocks) -> list[str]:
        """Gives allocated blocks back and returns the allocations that hold none any more."""
        ended: list[str] = []
        touched = set[int]()
        for group, (holder, ids) in enumerate(zip(self._holder, blocks, strict=True)):
            numbers, counts = np.unique(holder[ids], return_counts=True)
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
                self._left[number] -= count
                touched.add(number)
                if not self._left[number]:
                    ended.append(self._ids[number])
                    self._forget(number)
            holder[ids] = 0
            self._pins.take_back(group, ids)
        for number in touched & self._left.keys():
            if 2 * self._left[number] <= self._kept[number][1]:
                self._kept[number] = pack(self._of(number)), self._left[number]
                self._ledger.weigh(RowKind.ALLOCATION, self._ids[number], self._kept_bytes(number))
        return ended

    def free_allocation(self, allocation_id: str) -> None:
        """Gives back what is left of an allocation, if it still exists."""
        number, blocks = self._numbers.get(allocation_id), self.find(allocation_id)
        if number is not None and blocks is not None:
            for group, (holder, ids) in enumerate(zip(self._holder, blocks, strict=True)):
                holder[ids] = 0
                self._pins.take_back(group, ids)
            self._forget(number)

    def owner(self, allocation_id: str) -> str | None:
        """Returns the principal that owns an allocation, or None when the allocation does not exist."""
        terms = self._terms.get(self._numbers.get(allocation_id, _NO_NUMBER))
        return None if terms is None else terms.owner

    def give(self, allocation_id: str, owner: str) -> None:
        """Makes a principal the owner of an existing allocation."""
        number = self._numbers[allocation_id]
        self._terms[number] = replace(self._terms[number], owner=owner)

    def known(self, allocation_id: str) -> bool:
        """Returns whether an allocation still holds a block."""
        return allocation_id in self._numbers

    def find(self, allocation_id: str) -> Blocks | None:
        """Returns the blocks that an allocation still holds, or None when it does not exist."""
        number = self._numbers.get(allocation_id)
        return None if number is None else self._of(number)

    def rows(self) -> Iterator[tuple[str, Terms]]:
        """Returns all allocations, oldest first."""
        return ((allocation_id, self._terms[number]) for allocation_id, number in self._numbers.items())

    def holders(self, group: int, block: int) -> frozenset[str]:
        """Returns the allocations that hold a block as one of any group of its space."""
        alike = (other for other, space in enumerate(self._pins.spaces) if space == self._pins.spaces[group])
        numbers = {int(self._holder[other][block]) for other in alike if block < len(self._holder[other])}
        return frozenset(self._ids[number] for number in numbers if number)

    def check_usable(self, blocks: Blocks, allocation_id: str, caller: str) -> None:
        """Raises PreconditionFailed (BLOCK_NOT_ALLOCATED) for blocks that are free, in an allocation that the caller
        may not use, or given out for another group of their space. With a stated allocation, also for blocks outside of
        it.
        """
        number = self._numbers.get(allocation_id, _NO_NUMBER)
        for group, ids in enumerate(blocks):
            if not len(ids):
                continue
            holders = self._holder[group][ids]
            wanted = int(holders[0]) if not allocation_id else number
            right = holders == wanted if self._may_use(wanted, caller) else np.zeros(len(ids), dtype=bool)
            if right.all():
                continue
            if not allocation_id:
                usable = [other for other in np.unique(holders).tolist() if self._may_use(other, caller)]
                right = np.isin(holders, usable)
            missing = ids[~right]
            if len(missing):
                block = f"block {int(missing[0])} of group {group}"
                why = f"{block} is not allocated to this caller as one of that group; AllocateBlocks gives blocks out"
                if allocation_id:
                    why = f"{block} is not one of allocation {allocation_id}: it was freed, and may be another's by now"
                raise PreconditionFailed(Reason.BLOCK_NOT_ALLOCATED, why, metadata={"group": str(group)})

    def allocated(self, space: int) -> int:
        """Returns the number of blocks of a space that were given out."""
        groups = (group for group, other in enumerate(self._pins.spaces) if other == space)
        return sum(int(np.count_nonzero(self._holder[group])) for group in groups)

    def free_count(self, space: int) -> int:
        """Returns the number of blocks of a space that are neither pinned nor given out."""
        return self._pins.free[space]

    def _may_use(self, number: int, caller: str) -> bool:
        terms = self._terms.get(number)
        return terms is not None and may(caller, Verb.USE, Thing(ThingKind.BLOCKS, terms.owner))

    def _of(self, number: int) -> Blocks:
        kept, count = self._kept[number]
        blocks = unpack(kept)
        if count == self._left[number]:
            return blocks
        return tuple(ids[holder[ids] == number] for holder, ids in zip(self._holder, blocks, strict=True))

    def _forget(self, number: int) -> None:
        allocation_id = self._ids.pop(number)
        del self._numbers[allocation_id]
        self._ledger.drop(RowKind.ALLOCATION, allocation_id)
        del self._left[number], self._terms[number], self._kept[number]

    def _kept_bytes(self, number: int) -> int:
        terms = self._terms[number]
        texts = len(self._ids[number]) + len(terms.request_id) + len(terms.label)
        return ALLOCATION_BYTES + texts + kept_bytes(self._kept[number][0])


def _first_run(free: Ids, wanted: int) -> Ids:
    """Returns the lowest run of `wanted` consecutive free ids, or the lowest ids when there is no such run."""
    if 1 < wanted <= len(free):
        spread = free[wanted - 1 :] - free[: len(free) - wanted + 1]
        starts = np.flatnonzero(spread == wanted - 1)
        if len(starts):
            return free[starts[0] : starts[0] + wanted]
    return free[:wanted]
