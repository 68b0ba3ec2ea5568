"""Storage form of block ids: runs where those take less memory, expanded to ids whenever they are used."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np

from kvgrpc.core.values.block_ids import FEW_IDS, Blocks, Ids, runs_of
from kvgrpc.core.values.call import BlockLists

T = TypeVar("T")
ARRAY_BYTES = 120
"""Bytes of an array beside its numbers, with its place in a tuple."""
RUNS_BYTES = 400
"""Bytes of runs beside their numbers, with the objects that hold them."""
NO_IDS: Ids = np.empty(0, dtype=np.int64)
NO_IDS.setflags(write=False)


class _Runs(NamedTuple):
    """Runs of ids: `counts[i]` ids from `starts[i]` on, for each i in order."""

    starts: Ids
    counts: Ids

    def expanded(self) -> Ids:
        ends = np.cumsum(self.counts)
        ids: Ids = np.repeat(self.starts - ends + self.counts, self.counts) + np.arange(int(ends[-1]))
        return ids


class KeptBlocks:
    """Blocks of each group, some of them stored as runs."""

    def __init__(self, blocks: Blocks, few: int = FEW_IDS) -> None:
        self._rows = tuple(_packed(ids, few) for ids in blocks)

    @property
    def blocks(self) -> Blocks:
        """Ids of all groups. Ids that are stored as runs are computed anew at each access."""
        return tuple(row.expanded() if isinstance(row, _Runs) else row for row in self._rows)

    @property
    def kept_bytes(self) -> int:
        """Bytes of memory that the blocks take."""
        runs = sum(RUNS_BYTES + 2 * row.starts.nbytes for row in self._rows if isinstance(row, _Runs))
        ids = [row for row in self._rows if not isinstance(row, _Runs)]
        return runs + sum(ARRAY_BYTES + row.nbytes if row.size else 8 for row in ids)


Kept = Blocks | KeptBlocks


def pack(blocks: Blocks, few: int = FEW_IDS) -> Kept:
    """Returns blocks in storage form: the same object if no group has more than `few` ids and no array is a view."""
    for ids in blocks:
        if ids.size > few or ids.base is not None:
            return KeptBlocks(blocks, few)
    return blocks


def unpack(kept: Kept) -> Blocks:
    """Returns the ids of blocks in storage form."""
    return kept if type(kept) is tuple else kept.blocks  # type: ignore[union-attr]


def kept_bytes(kept: Kept) -> int:
    """Returns the bytes of memory that blocks in storage form take."""
    if isinstance(kept, KeptBlocks):
        return kept.kept_bytes
    nbytes = 0
    for ids in kept:
        nbytes += ARRAY_BYTES + ids.nbytes if ids.size else 8
    return nbytes


def keeping(*names: str) -> Callable[[type[T]], type[T]]:
    """Makes the named fields of a dataclass, each `Blocks` or None, use the storage form."""

    def decorate(made: type[T]) -> type[T]:
        for name in names:
            setattr(made, name, _BlocksField(name))
        return made

    return decorate


def keeping_lists(name: str) -> Callable[[type[T]], type[T]]:
    """Makes a field of `BlockLists` use the storage form, as `keeping` does for `Blocks`."""

    def decorate(made: type[T]) -> type[T]:
        setattr(made, name, _ListsField(name))
        return made

    return decorate


class _BlocksField:
    def __init__(self, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, instance: object, owner: type) -> Blocks | None:
        kept: Kept | None = instance.__dict__[self._name]
        return kept if kept is None or type(kept) is tuple else kept.blocks  # type: ignore[union-attr]

    def __set__(self, instance: object, blocks: Blocks | None) -> None:
        instance.__dict__[self._name] = None if blocks is None else pack(blocks)


class _ListsField:
    def __init__(self, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, instance: object, owner: type) -> BlockLists:
        kept: BlockLists | tuple[tuple[int, ...], KeptBlocks] = instance.__dict__[self._name]
        if len(kept) == 2 and isinstance(kept[1], KeptBlocks):
            return tuple(zip(kept[0], kept[1].blocks, strict=True))
        return kept

    def __set__(self, instance: object, lists: BlockLists) -> None:
        kept = pack(tuple([ids for _, ids in lists]))
        if isinstance(kept, KeptBlocks):
            instance.__dict__[self._name] = tuple([group for group, _ in lists]), kept
        else:
            instance.__dict__[self._name] = lists


def kept(instance: object, field: str = "blocks") -> Kept:
    """Returns the storage form of a field of `Blocks` that `keeping` made."""
    found: Kept = instance.__dict__[f"_{field}"]
    return found


def lists_kept(instance: object, field: str = "blocks") -> Kept:
    """Returns the storage form of a field of `BlockLists` that `keeping_lists` made."""
    found = instance.__dict__[f"_{field}"]
    if len(found) == 2 and isinstance(found[1], KeptBlocks):
        return found[1]
    return tuple([ids for _, ids in found])


def blocks_bytes(blocks: Blocks) -> int:
    """Returns the bytes of memory that blocks would take in storage form."""
    return kept_bytes(pack(blocks))


def no_blocks(groups: int) -> Blocks:
    """Returns an empty block list for each of `groups` groups."""
    return (NO_IDS,) * groups


def _packed(ids: Ids, few: int) -> Ids | _Runs:
    if not len(ids):
        return NO_IDS
    if len(ids) > few:
        starts, counts = runs_of(ids)
        if 4 * len(starts) < len(ids):
            return _Runs(starts, counts)
    return ids if ids.base is None else ids.copy()
