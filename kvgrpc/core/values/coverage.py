"""Whether bytes of a rank's memory are of blocks that were granted."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvgrpc.core.values.descriptors import Blocks, Ids
from kvgrpc.core.values.layout import PoolLayout, Region


def covered(pool: PoolLayout, stage: int, blocks: Blocks, offsets: Ids, nbytes: Ids) -> bool:
    """Whether each run, of `nbytes[i]` > 0 from `offsets[i]` on in the memory of a rank of that stage, lies within
    these blocks of one group in one region: within one, or some that follow each other without a gap. Shapes [runs];
    the sums of offsets and lengths fit into int64.

    Takes time for the runs and the groups, and for the blocks that a pool has.
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
    """Which runs lie within these blocks, of one group."""
    granted = np.zeros(blocks + 1, dtype=np.int64)
    granted[ids + 1] = 1
    before = np.cumsum(granted)
    in_order = sorted(regions, key=lambda region: region.offset)
    begins, starts, strides, each = np.array(_placed(in_order, blocks), dtype=np.int64).T
    row = np.searchsorted(begins, offsets, side="right") - 1
    known, begin, stride = row >= 0, begins[row], strides[row]
    first = (offsets - begin) // stride
    # The region of which it has a block: the last one whose first block begins no later in the row.
    region = np.maximum(np.searchsorted(starts, offsets - first * stride, side="right") - 1, 0)
    within, size = offsets - first * stride - starts[region], each[region]
    # A run that goes on into the next block does so without a gap only where blocks lie side by side.
    last = np.where(stride == size, first + (within + nbytes - 1) // size, first)
    fits = np.where(stride == size, True, within + nbytes <= size)
    inside = known & fits & (first < blocks) & (last < blocks)
    first, last = np.where(inside, first, 0), np.where(inside, last, 0)
    found: NDArray[np.bool_] = inside & (before[last + 1] - before[first] == last - first + 1)
    return found


def _placed(regions: Sequence[Region], blocks: int) -> list[tuple[int, int, int, int]]:
    """Of each region, by offset: where its row of regions begins, where it does, the stride, and a block's bytes. In a
    row stand the blocks of several regions by turns (`layout.PoolLayout`).
    """
    found, begin, end = [], 0, 0
    for region in regions:
        if region.offset >= end:
            begin = region.offset
        end = max(end, region.offset + (blocks - 1) * region.stride_bytes + region.block_bytes)
        found.append((begin, region.offset, region.stride_bytes, region.block_bytes))
    return found
