"""In which parts a round of a move is posted, and in which a destination asks for checksums."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvgrpc.core.values.bridge import Bridge
from kvgrpc.core.values.chunks import Chunk, Size
from kvgrpc.core.values.plans import PairRuns

RUNS_MAX = 1 << 17
"""Runs of one posting, unless one block alone has more: they are planned at once, and go to a worker in one frame."""


@dataclass(frozen=True, eq=False)
class Slice:
    """What of a round is posted by itself."""

    planned: tuple[PairRuns, ...]
    """What each pair of ranks moves of it; empty: it is not planned yet."""
    parts: Sequence[Chunk]
    """What it moves, and what the destination compares by checksums once it has moved."""


def slices_of(chunks: Sequence[Chunk], bridge: Bridge, most: Size) -> list[Chunk]:
    """The chunks in parts of whole blocks of one group, of at most that much or one block, in their order."""
    found = []
    for chunk in chunks:
        for group in range(len(chunk.source)):
            extent = bridge.extent(chunk, group)
            nbytes, _, runs = bridge.size_of_block(group, chunk.layers)
            if not extent or not nbytes:
                continue
            tokens = bridge.block_tokens(group)
            step = tokens * max(min(most.nbytes // nbytes, most.blocks, most.runs // runs), 1)
            for begin in range(extent.start // tokens * tokens, extent.stop, step):
                part = range(max(begin, extent.start), min(begin + step, extent.stop))
                found.append(bridge.part(chunk, group, part))
    return found


def batches(parts: Sequence[Chunk], bridge: Bridge, most: Size) -> list[list[Chunk]]:
    """The parts, one after the other, in lists of at most that much or one part."""
    found: list[list[Chunk]] = []
    left = Size(0, 0, 0)
    for part in parts:
        size = bridge.size_of([part])
        if not found or any(some > room for some, room in zip(size, left, strict=True)):
            found.append([])
            left = most
        found[-1].append(part)
        left = Size(*(room - some for some, room in zip(size, left, strict=True)))
    return found


def bytes_by_rank(planned: Sequence[PairRuns]) -> dict[int, int]:
    """The bytes that each rank of the destination gets, of all its pairs, as they move."""
    found: dict[int, int] = {}
    for some in planned:
        found[some.pair.rank] = found.get(some.pair.rank, 0) + some.runs.total_bytes
    return found


def split(planned: Sequence[PairRuns], most: int) -> tuple[tuple[PairRuns, ...], tuple[PairRuns, ...]]:
    """What moves now, at most so many bytes to each rank of the destination, and what is left of it. What is re-packed
    moves as a whole.
    """
    totals = bytes_by_rank(planned)
    if all(total <= most for total in totals.values()):
        return tuple(planned), ()
    whole = [some for some in planned if some.repack is not None]
    cut = [
        (some, *some.runs.split(max(most * some.runs.total_bytes // totals[some.pair.rank], 1)))
        for some in planned
        if some.repack is None
    ]
    now = (*whole, *(replace(some, runs=runs) for some, runs, _ in cut))
    return now, tuple(replace(some, runs=rest) for some, _, rest in cut if rest is not None)
