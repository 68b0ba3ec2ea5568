"""Checks that bytes of a rank's memory belong to granted blocks."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvgrpc.core.values.block_ids import Blocks, Ids
from kvgrpc.core.values.layout import PoolLayout, Region


def covered(pool: PoolLayout, stage: int, blocks: Blocks, offsets: Ids, nbytes: Ids) -> bool:
    """Returns True if each run lies within these blocks of one group in one region. Run i has `nbytes[i]` > 0 bytes
    from `offsets[i]` on in the memory of a rank of that stage; it may span blocks that follow each other without a gap.
    Shapes are [runs], and offset plus length fits into int64.

    The time grows with the runs, the groups, and the blocks of the pool.
    """
    if not len(offsets):
        return True
    if int(nbytes.min()) <= 0 or int(offsets.min()) < 0:
        return False
    found = np.zeros(len(offsets), dtype=bool)
    for group, ids in enumerate(blocks):
        regions = [region for region in pool.by_group[group] if region.stage == stage]
        if len(ids) and regions and not found.all():
            found |= _within(regions, ids, pool.groups[group].blocks, offsets, nbytes)
    return bool(found.all())


def _within(regions: Sequence[Region], ids: Ids, blocks: int, offsets: Ids, nbytes: Ids) -> NDArray[np.bool_]:
    """Returns a mask of the runs that lie within these blocks of one group."""
    granted = np.zeros(blocks + 1, dtype=np.int64)
    granted[ids + 1] = 1
    before = np.cumsum(granted)
    in_order = sorted(regions, key=lambda region: region.offset)
    begins, starts, strides, each = np.array(_placed(in_order, blocks), dtype=np.int64).T
    row = np.searchsorted(begins, offsets, side="right") - 1
    known, begin, stride = row >= 0, begins[row], strides[row]
    first = (offsets - begin) // stride
    # The region of the run is the last one whose first block begins no later in the row.
    region = np.maximum(np.searchsorted(starts, offsets - first * stride, side="right") - 1, 0)
    within, size = offsets - first * stride - starts[region], each[region]
    # A run continues into the next block without a gap only where blocks lie side by side.
    last = np.where(stride == size, first + (within + nbytes - 1) // size, first)
    fits = np.where(stride == size, True, within + nbytes <= size)
    inside = known & fits & (first < blocks) & (last < blocks)
    first, last = np.where(inside, first, 0), np.where(inside, last, 0)
    found: NDArray[np.bool_] = inside & (before[last + 1] - before[first] == last - first + 1)
    return found


def _placed(regions: Sequence[Region], blocks: int) -> list[tuple[int, int, int, int]]:
    """Returns for each region, by offset: begin of its row, its own offset, stride and bytes of a block. The blocks of
    several regions alternate in a row (`layout.PoolLayout`).
    """
    found, begin, end = [], 0, 0
    for region in regions:
        if region.offset >= end:
            begin = region.offset
        end = max(end, region.offset + (blocks - 1) * region.stride_bytes + region.block_bytes)
        found.append((begin, region.offset, region.stride_bytes, region.block_bytes))
    return found
