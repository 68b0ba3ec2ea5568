"""Pins: reasons why a block may not be reused.

A block is reusable when it has no pin. Read pins (LEASE, ACCESS) share a block. A TARGET or QUARANTINE is alone on its
block. Groups of one block space share their blocks, so counts are per space. A block is pinned for one group at a time,
because its content is that group's.

The table is the only place with this knowledge. Leases, transfers and accesses add and drop their pins here. `check`
proves that counts and owners agree.
"""

from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import islice
from typing import TypeVar

import numpy as np

from kvgrpc.core.values.block_ids import Blocks, Ids, keeping, kept, kept_bytes
from kvgrpc.core.values.records import dataclass
from kvgrpc.errors import PreconditionFailed, Reason


class PinKind(Enum):
    """The reason why a block is pinned."""

    # Hashes by identity, as `timers.Timer` does.
    __hash__ = object.__hash__

    LEASE = "lease"
    TARGET = "target"
    ACCESS = "access"
    QUARANTINE = "quarantine"


T = TypeVar("T")
Counts = np.ndarray[tuple[int], np.dtype[np.int32]]
"""One count for each block of a space."""
HOLDERS_LOOKED_AT = 1_024
"""Maximum number of pins that are looked at to name the holders of a block."""
EXCLUSIVE = frozenset({PinKind.TARGET, PinKind.QUARANTINE})


@keeping("blocks")
@dataclass(frozen=True, eq=False)
class Pin:
    """The blocks that one owner pins for one reason."""

    owner: str
    kind: PinKind
    blocks: Blocks
    since: float


class PinTable:
    """All pins of one pool. `blocks` is the number of blocks of each group, and `spaces` is its block space. With None
    each group has a space of its own.
    """

    def __init__(self, blocks: tuple[int, ...], spaces: tuple[int, ...] | None = None) -> None:
        self.spaces = tuple(range(len(blocks))) if spaces is None else spaces
        """The block space of each group. Read-only outside."""
        sizes = dict(zip(self.spaces, blocks, strict=True))
        self._pins: dict[tuple[str, PinKind], Pin] = {}
        # Groups of one space have the same arrays.
        self._shared = self._for_each(np.zeros(n, dtype=np.int32) for n in sizes.values())
        self._exclusive = self._for_each(np.zeros(n, dtype=bool) for n in sizes.values())
        self._given = self._for_each(np.zeros(n, dtype=bool) for n in sizes.values())
        """True for each block that the allocator gave out."""
        self._soft = self._for_each(np.zeros(n, dtype=np.int32) for n in sizes.values())
        """Number of soft pins among the shared pins of each block."""
        self._pinned_as: list[Counts | None] = self._for_each(
            np.zeros(n, dtype=np.int32) if self.spaces.count(space) > 1 else None for space, n in sizes.items()
        )
        """For a space shared by groups, the group for which each block was pinned last."""
        self.free = list(sizes.values())
        """Number of blocks of each space that are neither pinned nor given out. Read-only outside."""
        self.soft = [0] * len(sizes)
        """Number of blocks of each space that only soft pins hold. Read-only outside."""
        self.soft_given = [0] * len(sizes)
        """Number of blocks in `soft` that were given out. Read-only outside."""
        self._softened: set[tuple[str, PinKind]] = set()
        self.quarantined = [0] * len(sizes)
        """Number of blocks of each space in quarantine. Read-only outside."""
        self.quarantines = 0
        """Number of pins that ever became quarantines. Read-only outside."""

    def check_free_for(self, kind: PinKind, blocks: Blocks) -> None:
        """Raises PreconditionFailed (BLOCK_PINNED) when a pin of `kind` would conflict. Changes nothing."""
        for group, ids in enumerate(blocks):
            taken = self._exclusive[group][ids]
            pinned_as = self._pinned_as[group]
            if kind in EXCLUSIVE:
                taken = taken | (self._shared[group][ids] > 0)
            elif pinned_as is not None:
                taken = taken | ((self._shared[group][ids] > 0) & (pinned_as[ids] != group))
            if taken.any():
                block = int(ids[int(np.argmax(taken))])
                holders = ", ".join(self._holders(group, block)) or "another hand-over"
                raise PreconditionFailed(
                    Reason.BLOCK_PINNED,
                    f"block {block} of group {group} is pinned by {holders}",
                    metadata={"group": str(group)},
                )

    def add(self, owner: str, kind: PinKind, blocks: Blocks, now: float) -> None:
        """Pins `blocks` (distinct ids) for `owner`, which has no such pin. Raises as `check_free_for`."""
        assert (owner, kind) not in self._pins, f"{owner} pins twice"
        self.check_free_for(kind, blocks)
        self._pins[owner, kind] = Pin(owner, kind, blocks, now)
        self._count(kind, blocks, 1)

    def extend(self, owner: str, kind: PinKind, blocks: Blocks, now: float) -> None:
        """Pins `blocks` too for an owner that may have such a pin on other blocks. Raises as `check_free_for`."""
        assert kind not in EXCLUSIVE
        assert (owner, kind) not in self._softened
        pin = self._pins.get((owner, kind))
        if pin is None:
            self.add(owner, kind, blocks, now)
        elif any(len(ids) for ids in blocks):
            self.check_free_for(kind, blocks)
            joined = tuple(np.concatenate(both) for both in zip(pin.blocks, blocks, strict=True))
            self._pins[owner, kind] = Pin(owner, kind, joined, pin.since)
            self._count(kind, blocks, 1)

    def soften(self, owner: str, kind: PinKind) -> None:
        """Counts the owner's read pin as soft until it is hardened or dropped."""
        pin = self._pins.get((owner, kind))
        if pin is not None and (owner, kind) not in self._softened:
            self._softened.add((owner, kind))
            self._count_soft(pin.blocks, 1)

    def harden(self, owner: str, kind: PinKind) -> None:
        """Counts the owner's read pin, if there is one, as hard again."""
        if (owner, kind) in self._softened:
            self._softened.remove((owner, kind))
            self._count_soft(self._pins[owner, kind].blocks, -1)

    def held(self, owner: str, kind: PinKind) -> Blocks:
        """Returns the blocks of the owner's existing pin of that kind."""
        return self._pins[owner, kind].blocks

    def none(self) -> list[Counts]:
        """Returns zero counts for each group. Groups of one space have the same array."""
        shared = dict(zip(self.spaces, self._shared, strict=True))
        return self._for_each(np.zeros_like(counts) for counts in shared.values())

    def free_without(self, group: int, ids: Ids, gone: Counts, *, given: bool) -> Ids:
        """Returns the `ids` that would be free without `gone[block]` read pins of each block. With `given`, blocks that
        were given out count too.
        """
        free = (self._shared[group][ids] == gone[ids]) & ~self._exclusive[group][ids]
        kept: Ids = ids[free if given else free & ~self._given[group][ids]]
        return kept

    def give_out(self, group: int, ids: Ids) -> None:
        """Marks free blocks as given out by the allocator."""
        self._given[group][ids] = True
        self.free[self.spaces[group]] -= len(ids)

    def take_back(self, group: int, ids: Ids) -> None:
        """Gives blocks back to the allocator. Pinned ones come free at their last unpin."""
        self._count_softly_held(group, ids, -1)
        self._given[group][ids] = False
        self._count_softly_held(group, ids, 1)
        self.free[self.spaces[group]] += self.unpinned(group, ids).size

    def drop(self, owner: str, kind: PinKind) -> Blocks:
        """Removes the owner's pin of that kind. Returns its blocks, or () when there was none."""
        if self._softened:
            self.harden(owner, kind)
        pin = self._pins.pop((owner, kind), None)
        if pin is None:
            return ()
        blocks = pin.blocks
        self._count(kind, blocks, -1)
        return blocks

    def quarantine(self, owner: str, now: float) -> None:
        """Turns the owner's TARGET into a QUARANTINE in one step, so the blocks are never free in between."""
        pin = self._pins.pop((owner, PinKind.TARGET))
        self._pins[owner, PinKind.QUARANTINE] = Pin(owner, PinKind.QUARANTINE, pin.blocks, now)
        self._count_quarantined(pin.blocks, 1)
        self.quarantines += 1

    def blocks(self, owner: str, kind: PinKind) -> Blocks:
        """Returns the blocks of the owner's existing pin of that kind."""
        return self._pins[owner, kind].blocks

    def kept_bytes(self, owner: str, kind: PinKind) -> int:
        """Estimates the bytes of an owner's pinned blocks, or returns 0 when it has no such pin."""
        pin = self._pins.get((owner, kind))
        return 0 if pin is None else kept_bytes(kept(pin))

    def has(self, owner: str, kind: PinKind) -> bool:
        return (owner, kind) in self._pins

    def reclaimable(self, space: int, *, given: bool = False) -> int:
        """Returns how many blocks would come free if all soft pins were dropped. `given` is as in `free_without`."""
        return self.soft[space] - (0 if given else self.soft_given[space])

    def unpinned(self, group: int, ids: Ids) -> Ids:
        kept: Ids = ids[(self._shared[group][ids] == 0) & ~self._exclusive[group][ids]]
        return kept

    def unpinned_without(self, owners: Iterable[tuple[str, PinKind]], blocks: Blocks) -> Blocks:
        """Returns the `blocks` that have no pins but these owners' read pins."""
        pins = [pin for owner in owners if (pin := self._pins.get(owner)) is not None]
        free = []
        for group, ids in enumerate(blocks):
            theirs = np.zeros_like(self._shared[group])
            for pin in pins:
                theirs[pin.blocks[group]] += 1
            free.append(ids[(self._shared[group][ids] == theirs[ids]) & ~self._exclusive[group][ids]])
        return tuple(free)

    def pinned_mask(self, group: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Returns for every block of the group's space whether it has a pin."""
        mask: np.ndarray[tuple[int], np.dtype[np.bool_]] = (self._shared[group] > 0) | self._exclusive[group]
        return mask

    def free_mask(self, group: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Returns for every block of the group's space whether it is neither pinned nor given out."""
        mask: np.ndarray[tuple[int], np.dtype[np.bool_]] = ~(self._given[group] | self.pinned_mask(group))
        return mask

    def of_block(self, group: int, block: int) -> list[Pin]:
        """Returns the pins on one block for any group of its space, oldest first. Linear in the number of pins: for
        ListPins, not for the hot path.
        """
        groups = self._groups(self.spaces[group])
        return [pin for pin in self if any(block in pin.blocks[other] for other in groups)]

    def count_blocks(self, space: int, kind: PinKind) -> int:
        """Returns the number of distinct blocks of a space with a pin of that kind. Linear in the number of pins."""
        groups = self._groups(space)
        has = np.zeros(len(self._given[groups[0]]), dtype=bool)
        for pin in self._pins.values():
            if pin.kind is kind:
                blocks = pin.blocks
                for group in groups:
                    has[blocks[group]] = True
        return int(np.count_nonzero(has))

    def __iter__(self) -> Iterator[Pin]:
        """Iterates over all pins, oldest first."""
        return iter(self._pins.values())

    def __len__(self) -> int:
        return len(self._pins)

    def check(self) -> None:
        """Asserts that the counts match the pins. For tests and simulators."""
        for space in range(len(self.free)):
            groups = self._groups(space)
            shared, exclusive, given = (table[groups[0]] for table in (self._shared, self._exclusive, self._given))
            none = np.empty(0, dtype=np.int64)
            listed: tuple[list[Ids], list[Ids]] = [none], [none]
            for pin in self._pins.values():
                listed[pin.kind in EXCLUSIVE].extend(pin.blocks[group] for group in groups)
            counts = [np.bincount(np.concatenate(ids), minlength=len(shared)) for ids in listed]
            assert (counts[0] == shared).all()
            assert (counts[1] == exclusive).all()
            assert not (exclusive & (shared > 0)).any()
            assert self.quarantined[space] == self.count_blocks(space, PinKind.QUARANTINE)
            assert self.free[space] == int(self.free_mask(groups[0]).sum())
            soft = [self._pins[name].blocks[group] for name in self._softened for group in groups]
            soft_counts = np.bincount(np.concatenate([*soft, none]), minlength=len(shared))
            assert (soft_counts == self._soft[groups[0]]).all()
            held = (shared > 0) & (shared == self._soft[groups[0]])
            assert (self.soft[space], self.soft_given[space]) == (held.sum(), (held & given).sum())
        for group, pinned_as in enumerate(self._pinned_as):
            if pinned_as is not None:
                assert all((pinned_as[pin.blocks[group]] == group).all() for pin in self._pins.values())

    def _for_each(self, of_spaces: Iterable[T]) -> list[T]:
        """Returns for each group the item of its space."""
        found = list(of_spaces)
        return [found[space] for space in self.spaces]

    def _groups(self, space: int) -> list[int]:
        return [group for group, other in enumerate(self.spaces) if other == space]

    def _holders(self, group: int, block: int) -> Iterator[str]:
        """Yields text about each pin on a block, with its group if that is another one. The search is bounded."""
        groups = self._groups(self.spaces[group])
        for pin in islice(self._pins.values(), HOLDERS_LOOKED_AT):
            other = next((i for i in groups if block in pin.blocks[i]), None)
            if other is None:
                continue
            yield f"{pin.kind.value} {pin.owner}" + (f" as a block of group {other}" if other != group else "")

    def _count_quarantined(self, blocks: Blocks, step: int) -> None:
        for group, ids in enumerate(blocks):
            self.quarantined[self.spaces[group]] += step * len(ids)

    def _count_soft(self, blocks: Blocks, step: int) -> None:
        # While this pin is hard, soft pins alone hold none of its blocks. It is hard before +1 and after -1.
        for group, ids in enumerate(blocks):
            if step < 0:
                self._count_softly_held(group, ids, -1)
            self._soft[group][ids] += step
            if step > 0:
                self._count_softly_held(group, ids, 1)

    def _count_softly_held(self, group: int, ids: Ids, step: int) -> None:
        """Adds `step` for each of `ids` that only soft pins hold: -1 before a change to them, and +1 after it."""
        held = self._shared[group][ids]
        soft = (held > 0) & (held == self._soft[group][ids])
        if count := int(np.count_nonzero(soft)):
            space = self.spaces[group]
            self.soft[space] += step * count
            self.soft_given[space] += step * int(np.count_nonzero(soft & self._given[group][ids]))

    def _count(self, kind: PinKind, blocks: Blocks, step: int) -> None:
        if kind is PinKind.QUARANTINE:
            self._count_quarantined(blocks, step)
        for group, ids in enumerate(blocks):
            pinned_as = self._pinned_as[group]
            if pinned_as is not None and step > 0:
                pinned_as[ids] = group
            changed = ~self._given[group][ids]
            if kind in EXCLUSIVE:
                self._exclusive[group][ids] = step > 0
            else:
                # This pin is hard, so soft pins alone hold none of its blocks while it is there.
                if self._softened and step > 0:
                    self._count_softly_held(group, ids, -1)
                pins = self._shared[group][ids]
                pins += step
                self._shared[group][ids] = pins
                if self._softened and step < 0:
                    self._count_softly_held(group, ids, 1)
                # Blocks for which this was the first pin to come or the last one to go.
                changed &= pins == (step > 0)
            self.free[self.spaces[group]] -= step * int(np.count_nonzero(changed))
