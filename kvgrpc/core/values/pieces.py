"""Byte ranges of blocks over which checksums are computed."""

from collections.abc import Iterator, Sequence
from dataclasses import field

import numpy as np

from kvgrpc.core.values.block_ids import Blocks, Ids
from kvgrpc.core.values.call import LayerRange
from kvgrpc.core.values.chunks import Chunk
from kvgrpc.core.values.layout import PoolLayout, Region
from kvgrpc.core.values.records import dataclass


@dataclass(frozen=True, eq=False)
class Pieces:
    """Bytes of a rank's memory: checksum i is over the next `counts[i]` pieces, each `nbytes` from its offset on.

    Shapes are [pieces], [pieces] and [checksums], int64.
    """

    offsets: Ids
    nbytes: Ids
    counts: Ids


PORTION_BYTES = 64 << 20
"""Maximum bytes that the ranks process at once for one caller: some milliseconds of work."""
PORTION_ROWS = 1_024
PIECE_BYTES = 1_024
"""Minimum bytes that a piece counts for, since small pieces cost their planning."""


@dataclass(eq=False)
class RankChecksums:
    """The checksums that all ranks of this engine were asked for."""

    left: set[int]
    """Ranks that have not answered."""
    values: dict[int, bytes] = field(default_factory=dict)
    """Checksums of each rank, as consecutive little-endian uint32."""
    error: str = ""

    def take(self, rank: int, values: bytes, error: str) -> bool:
        """Records a rank's answer. Returns True if it was the last one missing."""
        self.left.discard(rank)
        self.values[rank] = values
        self.error = self.error or error
        return not self.left

    def by_rank(self) -> tuple[bytes, ...]:
        return tuple(self.values[rank] for rank in sorted(self.values))


def pieces_of(pool: PoolLayout, blocks: Sequence[tuple[Blocks, LayerRange | None]], stage: int = 0) -> Pieces:
    """Returns the pieces of a rank of one pipeline stage, with one checksum for each block, in the order of the list,
    the groups and the blocks. A checksum is over the block's regions in order.
    """
    offsets, nbytes, counts = [], [], []
    for lists, layers in blocks:
        for group, ids in enumerate(lists):
            regions = [region for region in _regions(pool, group, layers) if region.stage == stage]
            if not len(ids) or not regions:
                continue
            starts = np.array([region.offset for region in regions], dtype=np.int64)
            strides = np.array([region.stride_bytes for region in regions], dtype=np.int64)
            each = np.array([region.block_bytes for region in regions], dtype=np.int64)
            offsets.append((starts + ids[:, None] * strides).ravel())
            nbytes.append(np.broadcast_to(each, (len(ids), len(regions))).reshape(-1))
            counts.append(np.broadcast_to(np.int64(len(regions)), len(ids)))
    return Pieces(_one_after_the_other(offsets), _one_after_the_other(nbytes), _one_after_the_other(counts))


def portions_of(
    pool: PoolLayout, blocks: Sequence[tuple[Blocks, LayerRange | None]]
) -> Iterator[list[tuple[Blocks, LayerRange | None]]]:
    """Yields the same blocks in the same order, in portions of whole blocks: of PORTION_BYTES at most, or one block."""
    costs: dict[tuple[int, LayerRange | None], int] = {}
    found: list[tuple[Blocks, LayerRange | None]] = []
    room = PORTION_BYTES
    for lists, layers in blocks:
        for group, ids in enumerate(lists):
            if not len(ids):
                continue
            if (group, layers) not in costs:
                regions = _regions(pool, group, layers)
                costs[group, layers] = sum(max(region.block_bytes, PIECE_BYTES) for region in regions)
            cost, first = costs[group, layers], 0
            while cost and first < len(ids):
                if found and (room < cost or len(found) == PORTION_ROWS):
                    yield found
                    found, room = [], PORTION_BYTES
                end = min(first + max(room // cost, 1), len(ids))
                found.append((_only(lists, group, first, end), layers))
                room -= (end - first) * cost
                first = end
    if found:
        yield found


def _one_after_the_other(parts: list[Ids]) -> Ids:
    """Concatenates arrays. A single array is not copied: new memory for thousands of blocks costs more than its use."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def place_of(pool: PoolLayout, chunks: Sequence[Chunk], number: int) -> str:
    """Returns the block of checksum `number` of the chunks, as text."""
    lists = [
        (chunk, group)
        for chunk in chunks
        for group, ids in enumerate(chunk.source)
        if len(ids) and _regions(pool, group, chunk.layers)
    ]
    at = iter(lists)
    chunk, group = next(at)
    while number >= len(chunk.source[group]):
        number -= len(chunk.source[group])
        chunk, group = next(at)
    layers = f", layers {chunk.layers[0]} +{chunk.layers[1]}" if chunk.layers else ""
    block, here = int(chunk.source[group][number]), int(chunk.destination[group][number])
    return f"block {block} of group {group}{layers}, received into block {here}"


def _regions(pool: PoolLayout, group: int, layers: LayerRange | None) -> list[Region]:
    """Returns the regions of a group that hold these layers."""
    return [region for region in pool.by_group[group] if layers is None or region.holds(layers)]


def _only(blocks: Blocks, group: int, first: int, end: int) -> Blocks:
    """Returns block lists with only blocks [first, end) of one group."""
    return tuple(ids[first:end] if i == group else ids[:0] for i, ids in enumerate(blocks))
