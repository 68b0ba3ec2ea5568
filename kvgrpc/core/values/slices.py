"""Splits a round of a move into postings, and into batches for which a destination asks for checksums."""

from collections.abc import Sequence
from dataclasses import replace

from kvgrpc.core.values.bridge import Bridge
from kvgrpc.core.values.chunks import Chunk, Size
from kvgrpc.core.values.plans import PairRuns
from kvgrpc.core.values.records import dataclass

RUNS_MAX = 1 << 17
"""Maximum runs of one posting, unless one block has more: they are planned at once, and go to a worker in one frame."""


@dataclass(frozen=True, eq=False)
class RoundSlice:
    """A part of a round that is posted by itself."""

    planned: tuple[PairRuns, ...]
    """Runs of each pair of ranks; empty if they are not planned yet."""
    parts: Sequence[Chunk]
    """Chunks that the slice moves. The destination compares their checksums after the move."""


def slices_of(chunks: Sequence[Chunk], bridge: Bridge, most: Size) -> list[Chunk]:
    """Cuts the chunks into parts of whole blocks of one group, in order. Each is at most `most`, or one block."""
    found = []
    for chunk in chunks:
        for group in range(len(chunk.source)):
            extent = bridge.extent(chunk, group)
            nbytes, _, runs = bridge.size_of_block(group, chunk.layers)
            if not extent or not nbytes:
                continue
            tokens = bridge.block_tokens[group]
            step = tokens * max(min(most.nbytes // nbytes, most.blocks, most.runs // runs), 1)
            for begin in range(extent.start // tokens * tokens, extent.stop, step):
                part = range(max(begin, extent.start), min(begin + step, extent.stop))
                found.append(bridge.part(chunk, group, part))
    return found


def batches(parts: Sequence[Chunk], bridge: Bridge, most: Size) -> list[list[Chunk]]:
    """Groups consecutive parts into lists of at most `most`, or of one part."""
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
    """Returns the bytes that each rank of the destination receives over all its pairs, as they move."""
    found: dict[int, int] = {}
    for some in planned:
        found[some.pair.rank] = found.get(some.pair.rank, 0) + some.runs.total_bytes
    return found


def split(planned: Sequence[PairRuns], most: int) -> tuple[tuple[PairRuns, ...], tuple[PairRuns, ...]]:
    """Splits planned runs into those that move now, at most `most` bytes to each rank of the destination, and the rest.
    Re-packed runs are not split: all of them move now.
    """
    totals = bytes_by_rank(planned)
    if max(totals.values(), default=0) <= most:
        return tuple(planned), ()
    whole = [some for some in planned if some.repack is not None]
    cut = [
        (some, *some.runs.split(max(most * some.runs.total_bytes // totals[some.pair.rank], 1)))
        for some in planned
        if some.repack is None
    ]
    now = (*whole, *(replace(some, runs=runs) for some, runs, _ in cut))
    return now, tuple(replace(some, runs=rest) for some, _, rest in cut if rest is not None)
