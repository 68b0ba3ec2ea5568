"""What one round of a move takes from where to where, in blocks; and its blocks as bytes to compute checksums of."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvgrpc.core.values.calls import LayerRange
from kvgrpc.core.values.descriptors import Blocks, Ids, Runs, holds, plan_runs
from kvgrpc.core.values.layout import PoolLayout, Region

RUNS_MAX = 1 << 17
"""Runs of one posting, unless one block alone has more: they are planned at once, and go to a worker in one frame."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """Blocks of each group of the source, and those of the destination that they fill, in `layers` (None: all)."""

    source: Blocks
    destination: Blocks
    layers: LayerRange | None


@dataclass(frozen=True, eq=False)
class Pieces:
    """Bytes of a rank's memory: checksum i is over the next `counts[i]` pieces, of `nbytes` from `offsets` on.

    Shapes [pieces], [pieces] and [checksums], int64.
    """

    offsets: Ids
    nbytes: Ids
    counts: Ids


PORTION_BYTES = 64 << 20
"""What the ranks compute at once for one caller: some milliseconds of their work."""
PORTION_ROWS = 1_024
PIECE_BYTES = 1_024
"""What a piece counts for at least: small ones cost their planning."""


@dataclass(eq=False)
class RankChecksums:
    """Checksums that were asked of all ranks of this engine."""

    left: set[int]
    """Ranks that have not answered."""
    values: dict[int, bytes] = field(default_factory=dict)
    """For each rank: uint32, little-endian, one after the other."""
    error: str = ""

    def take(self, rank: int, values: bytes, error: str) -> bool:
        """What a rank says; whether it was the last one."""
        self.left.discard(rank)
        self.values[rank] = values
        self.error = self.error or error
        return not self.left

    def by_rank(self) -> tuple[bytes, ...]:
        return tuple(self.values[rank] for rank in sorted(self.values))


class Size(NamedTuple):
    """How much something is, or may be at most."""

    nbytes: int
    blocks: int
    runs: int
    """At most so many: neighbours are joined when they are planned."""


class Sizes:
    """How large blocks of a pool are, in some of their layers."""

    def __init__(self, pool: PoolLayout) -> None:
        self._pool = pool
        self._known: dict[tuple[int, LayerRange], tuple[int, int]] = {}

    def of_block(self, group: int, layers: LayerRange | None) -> tuple[int, int]:
        """Bytes of a block in these layers, and the regions that hold them."""
        if layers is None:
            return self._pool.block_sizes[group]
        found = self._known.get((group, layers))
        if found is None:
            regions = _regions(self._pool, group, layers)
            found = self._known[group, layers] = sum(region.block_bytes for region in regions), len(regions)
        return found

    def of(self, chunks: Sequence[Chunk]) -> Size:
        nbytes = blocks = runs = 0
        for chunk in chunks:
            for group, ids in enumerate(chunk.source):
                if len(ids):
                    each, regions = self.of_block(group, chunk.layers)
                    nbytes += each * len(ids)
                    blocks += len(ids)
                    runs += regions * len(ids)
        return Size(nbytes, blocks, runs)


@dataclass(frozen=True, eq=False)
class Slice:
    """What of a round is posted by itself."""

    runs: Runs | None
    """None: not planned yet."""
    parts: Sequence[Chunk]
    """What it moves, and what the destination compares by checksums once it has moved."""


def slices_of(chunks: Sequence[Chunk], sizes: Sizes, most: Size) -> list[Chunk]:
    """The chunks in parts of whole blocks of one group, of at most that much or one block, in their order."""
    found = []
    for chunk in chunks:
        for group, ids in enumerate(chunk.source):
            if not len(ids):
                continue
            nbytes, runs = sizes.of_block(group, chunk.layers)
            if not nbytes:
                continue
            step = max(min(most.nbytes // nbytes, most.blocks, most.runs // runs), 1)
            for first in range(0, len(ids), step):
                end = first + step
                taken, filled = (_only(some, group, first, end) for some in (chunk.source, chunk.destination))
                found.append(Chunk(taken, filled, chunk.layers))
    return found


def batches(parts: Sequence[Chunk], sizes: Sizes, most: Size) -> list[list[Chunk]]:
    """The parts, one after the other, in lists of at most that much or one part."""
    found: list[list[Chunk]] = []
    left = Size(0, 0, 0)
    for part in parts:
        size = sizes.of([part])
        if not found or any(some > room for some, room in zip(size, left, strict=True)):
            found.append([])
            left = most
        found[-1].append(part)
        left = Size(*(room - some for some, room in zip(size, left, strict=True)))
    return found


def _only(blocks: Blocks, group: int, first: int, end: int) -> Blocks:
    """Some blocks of one group."""
    return tuple(ids[first:end] if i == group else ids[:0] for i, ids in enumerate(blocks))


def plan_chunks(chunks: Sequence[Chunk], source: PoolLayout, destination: PoolLayout) -> Runs:
    """What each rank moves. Raises as `plan_runs`."""
    runs = [plan_runs(source, destination, c.source, c.destination, c.layers) for c in chunks]
    if len(runs) == 1:
        return runs[0]
    return Runs(*(np.concatenate([getattr(some, name) for some in runs]) for name in ("src", "dst", "nbytes")))


def pieces_of(pool: PoolLayout, blocks: Sequence[tuple[Blocks, LayerRange | None]]) -> Pieces:
    """One checksum for each block, in the order of the list, the groups and the blocks; over its regions in order."""
    offsets, nbytes, counts = [], [], []
    for lists, layers in blocks:
        for group, ids in enumerate(lists):
            regions = _regions(pool, group, layers)
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
    """The same blocks in the same order, in parts of whole blocks: each of PORTION_BYTES at most, or one block."""
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
    """Not copied where that is one: of thousands of blocks new memory costs more than what it is for."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def place_of(pool: PoolLayout, chunks: Sequence[Chunk], number: int) -> str:
    """The block of checksum `number` of the chunks, as text."""
    sizes = Sizes(pool)
    lists = [
        (chunk, group)
        for chunk in chunks
        for group, ids in enumerate(chunk.source)
        if len(ids) and sizes.of_block(group, chunk.layers)[0]
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
    """Those of a group that hold these layers."""
    return [region for region in pool.regions if region.group == group and (layers is None or holds(region, layers))]
