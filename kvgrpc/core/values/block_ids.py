"""Arithmetic on block ids, as arrays, and the checks of ids from outside.

The arithmetic is pure and uses numpy, so that 65,536 blocks cost milliseconds. Every id is checked against its layout
before any address is computed: an id out of range would otherwise address the next layer.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvgrpc.core.values.layout import PoolLayout
from kvgrpc.errors import FieldViolation, InvalidRequest, OutOfRange, Reason, invalid

Ids = NDArray[np.int64]
Blocks = tuple[Ids, ...]
"""Block ids per group, in token order, with one entry for every group of the pool."""
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
        raise OutOfRange(
            Reason.LIMIT_EXCEEDED,
            f"{total} blocks in one request; the limit is {limit}",
            metadata={"limit": str(limit)},
        )
    if not total:
        return np.empty(0, dtype=np.int64)
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
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    if len(breaks) == len(ids) - 1:
        return ids, np.ones_like(ids)
    edges = np.concatenate(([0], breaks, [len(ids)]))
    return ids[edges[:-1]], np.diff(edges)


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
