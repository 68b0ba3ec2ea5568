"""Block ids as arrays: arithmetic, the checks of ids from outside, and the form in which ids are stored.

The arithmetic is pure and uses numpy, so that 65,536 blocks cost milliseconds. Every id is checked against its layout
before any address is computed: an id out of range would otherwise address the next layer. Ids are stored as runs if
these take less memory, and expanded whenever they are used.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvgrpc.core.values.layout import PoolLayout
from kvgrpc.errors import FieldViolation, InvalidRequest, KVGrpcError, OutOfRange, Reason, invalid, too_many

Ids = NDArray[np.int64]
Blocks = tuple[Ids, ...]
"""Block ids per group, in token order, with one entry for every group of the pool."""
BlockLists = tuple[tuple[int, Ids], ...]
"""Rows (group, block ids), as the caller wrote them."""
FEW_IDS = 64
"""Maximum number of ids for which a loop is faster than numpy's calls. Most requests have fewer."""
TABLE_BLOCKS_PER_ID = 64
"""Maximum size of the table, per id, by which duplicate ids are found. For thousands of ids a table is 8 to 20 times as
fast as sorting. Its size is limited because the highest id may come from a peer.
"""


def expand_runs(starts: Sequence[int], counts: Sequence[int], limit: int) -> Ids:
    """Returns block ids from runs (start, count), in order.

    Raises InvalidRequest if the two lists differ in length or a count is 0, and OutOfRange (LIMIT_EXCEEDED) if the runs
    name more than `limit` blocks. Both are checked before anything is allocated.
    """
    if len(starts) != len(counts):
        raise invalid("runs", f"have as many starts as counts, not {len(starts)} and {len(counts)}")
    count = np.asarray(counts, dtype=np.int64)
    if len(count) and int(count.min()) < 1:
        raise invalid("runs.counts", "are at least 1")
    total = int(count.sum())
    if total > limit:
        raise too_many(f"{total} blocks in one request; the limit is {limit}", limit)
    if not total:
        return np.empty(0, dtype=np.int64)
    if len(starts) == 1:
        return np.arange(starts[0], starts[0] + total, dtype=np.int64)
    start = np.array(starts, dtype=np.int64)
    if total == len(start):
        return start
    first = np.concatenate(([0], np.cumsum(count)[:-1]))
    ids: Ids = np.repeat(start - first, count) + np.arange(total)
    return ids


def to_runs(ids: Ids | Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns the maximal runs of consecutive ids, in order: the inverse of `expand_runs`."""
    if isinstance(ids, np.ndarray):
        if len(ids) > FEW_IDS:
            first, length = runs_of(ids)
            return first.tolist(), length.tolist()
        ids = ids.tolist()
    starts, counts = list[int](), list[int]()
    expected: int | None = None
    for block in ids:
        if block == expected:
            counts[-1] += 1
        else:
            starts.append(block)
            counts.append(1)
        expected = block + 1
    return starts, counts


def runs_of(ids: Ids) -> tuple[Ids, Ids]:
    """Does what `to_runs` does, for many ids (at least one)."""
    breaks = np.flatnonzero(ids[1:] - ids[:-1] != 1) + 1
    if len(breaks) == len(ids) - 1:
        return ids, np.ones_like(ids)
    return _cut(ids, breaks)


def _cut(ids: Ids, breaks: Ids) -> tuple[Ids, Ids]:
    """Returns first ids and lengths of the runs that begin at 0 and at `breaks`."""
    if not len(breaks):
        return ids[:1].copy(), np.array([len(ids)])
    edges = np.concatenate(([0], breaks, [len(ids)]))
    return ids[edges[:-1]], edges[1:] - edges[:-1]


def check_ids(ids: Ids, blocks: int, field: str, *, group: int | None = None, where: str = "") -> None:
    """Raises OutOfRange or InvalidRequest unless every id is in [0, blocks) and no id occurs twice. The error names
    `group` if given, and ends with `where` for a duplicate.
    """
    if not len(ids):
        return
    increasing = len(ids) == 1 or bool((ids[1:] > ids[:-1]).all())
    low, high = (int(ids[0]), int(ids[-1])) if increasing else (int(ids.min()), int(ids.max()))
    if low < 0 or high >= blocks:
        bad = low if low < 0 else high
        what = f"block {bad} does not exist; ids run from 0 to {blocks - 1}"
        raise OutOfRange(
            Reason.BLOCK_OUT_OF_RANGE,
            what,
            violations=(FieldViolation(field, what),),
            metadata={} if group is None else {"group": str(group), "block_count": str(blocks)},
        )
    if increasing:
        return
    if blocks <= TABLE_BLOCKS_PER_ID * len(ids):
        seen = np.zeros(blocks, dtype=bool)
        seen[ids] = True
        if int(np.count_nonzero(seen)) == len(ids):
            return
    in_order = np.sort(ids)
    twice = in_order[1:][in_order[1:] == in_order[:-1]]
    if len(twice):
        what = f"block {int(twice[0])} is listed twice{where}"
        raise InvalidRequest(Reason.BLOCK_DUPLICATE, what, violations=(FieldViolation(field, what),))


def check_spaces(blocks: Sequence[Ids], pool: PoolLayout, field: str) -> None:
    """Raises InvalidRequest (BLOCK_DUPLICATE) if two groups of one block space list the same block. The ids of each
    group must have passed `check_ids`.
    """
    for groups in pool.shared_spaces:
        listed = [blocks[group] for group in groups if len(blocks[group])]
        if len(listed) > 1:
            merged, count = np.concatenate(listed), pool.groups[groups[0]].blocks
            check_ids(merged, count, field, where=", in groups of one block space")


def wrong_lists(pool: PoolLayout, lists: BlockLists, tokens: int, *, exact: bool) -> str:
    """Returns the error in the blocks that a peer with this pool lists for its tokens, as text; empty if there is none.
    `exact`: the peer must list all blocks of the tokens, otherwise at most all.
    """
    groups = pool.groups
    if [group for group, _ in lists] != list(range(len(groups))):
        return "it does not list every group once"
    for group, (_, ids) in zip(groups, lists, strict=True):
        count = group.blocks_of(tokens)
        if len(ids) > count or (exact and len(ids) < count):
            return f"group {group.name} lists {len(ids)} blocks for {tokens} tokens"
        try:
            check_ids(ids, group.blocks, f"group {group.name}")
        except KVGrpcError as bad:
            return str(bad)
    try:
        check_spaces([ids for _, ids in lists], pool, "it")
    except KVGrpcError as bad:
        return str(bad)
    return ""


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
        if len(self.starts) == 1:
            start = int(self.starts[0])
            return np.arange(start, start + int(self.counts[0]), dtype=np.int64)
        ends = np.cumsum(self.counts)
        ids: Ids = np.repeat(self.starts - ends + self.counts, self.counts) + np.arange(int(ends[-1]))
        return ids


class KeptBlocks:
    """Blocks of each group, some of them stored as runs."""

    def __init__(self, rows: tuple[Ids | _Runs, ...]) -> None:
        self._rows = rows

    @property
    def blocks(self) -> Blocks:
        """Ids of all groups. Ids that are stored as runs are computed anew at each access."""
        return tuple([row.expanded() if isinstance(row, _Runs) else row for row in self._rows])

    @property
    def kept_bytes(self) -> int:
        """Bytes of memory that the blocks take."""
        nbytes = 0
        for row in self._rows:
            if isinstance(row, _Runs):
                nbytes += RUNS_BYTES + 2 * row.starts.nbytes
            else:
                nbytes += ARRAY_BYTES + row.nbytes if row.size else 8
        return nbytes


Kept = Blocks | KeptBlocks


def pack(blocks: Blocks, few: int = FEW_IDS) -> Kept:
    """Returns blocks in storage form: the same object if no group has more than `few` ids and no array is a view."""
    for ids in blocks:
        if ids.size > few or ids.base is not None:
            rows = [_packed(each, few) for each in blocks]
            whole = tuple([row for row in rows if not isinstance(row, _Runs)])
            return whole if len(whole) == len(rows) else KeptBlocks(tuple(rows))
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


def _long_runs(ids: Ids) -> _Runs | None:
    """Returns many ids as runs; None if those take more memory. Each object that keeps blocks asks, so the two usual
    lists are told early: one run by its ends and its order, a scattered list by its first quarter, which has as many
    runs as are allowed.
    """
    if int(ids[-1]) - int(ids[0]) == len(ids) - 1 and bool((ids[1:] > ids[:-1]).all()):
        return _Runs(ids[:1].copy(), np.array([len(ids)]))
    first = ids[: len(ids) // 4 + 2]
    if 4 * (int(np.count_nonzero(first[1:] - first[:-1] != 1)) + 1) >= len(ids):
        return None
    breaks = np.flatnonzero(ids[1:] - ids[:-1] != 1) + 1
    if 4 * (len(breaks) + 1) >= len(ids):
        return None
    return _Runs(*_cut(ids, breaks))


def _packed(ids: Ids, few: int) -> Ids | _Runs:
    if not len(ids):
        return NO_IDS
    if len(ids) > few and (runs := _long_runs(ids)) is not None:
        return runs
    return ids if ids.base is None else ids.copy()
