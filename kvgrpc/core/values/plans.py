"""Plans the byte runs of each pair of ranks from patterns and lists of blocks."""

from collections.abc import Sequence
from dataclasses import field
from typing import NamedTuple

import numpy as np

from kvgrpc.core.values.block_ids import Ids
from kvgrpc.core.values.byte_runs import Runs, coalesce
from kvgrpc.core.values.layout import Region
from kvgrpc.core.values.patterns import Pattern
from kvgrpc.core.values.records import dataclass
from kvgrpc.core.values.strips import Repack, Strip, spread


class Pair(NamedTuple):
    """Two ranks between which bytes move."""

    rank: int
    """Rank of the destination."""
    source_rank: int

    @property
    def turned(self) -> tuple[int, int]:
        """The same pair with the source's rank first."""
        return self.source_rank, self.rank


@dataclass(frozen=True, eq=False)
class PairRuns:
    """The runs that one pair moves for one posting."""

    pair: Pair
    runs: Runs
    repack: Repack | None = None
    """Copies out of the staging buffer, where the runs then end; None if the runs end in the destination's blocks."""

    @property
    def total_bytes(self) -> int:
        """Bytes that arrive in the destination's blocks."""
        return self.runs.total_bytes if self.repack is None else self.repack.total_bytes


class Units(NamedTuple):
    """The units that a chunk moves of one group, in token order. Shapes are [units]."""

    src: Ids
    dst: Ids
    """Block of each unit at the destination."""
    src_token: Ids | int
    """Token of its source block with which each unit begins."""
    dst_token: Ids | int
    listed: Ids
    """Blocks of the source that the units need, each once; shape [blocks]."""
    place: Ids
    """Index into `listed` of each unit's source block."""


_Columns = tuple[Ids, Ids, Ids]
"""Source offsets, destination offsets and lengths of runs."""


@dataclass(eq=False)
class Draft:
    """A posting of one pair, while it is planned."""

    columns: list[_Columns] = field(default_factory=list)
    strips: list[Strip] = field(default_factory=list)
    staging_bytes: int = 0

    def runs(self) -> Runs:
        """Returns all planned runs. There must be some."""
        if len(self.columns) == 1:
            return Runs(*self.columns[0])
        return Runs(*map(np.concatenate, zip(*self.columns, strict=True)))


def regions_of(patterns: Sequence[Pattern]) -> list[Region]:
    """Returns the regions of the source that the patterns read, each once."""
    return list({id(pattern.source): pattern.source for pattern in patterns}.values())


def list_runs(draft: Draft, patterns: Sequence[Pattern], units: Units) -> None:
    """Adds the runs of these patterns to the draft."""
    known: dict[tuple[object, ...], _Columns] = {}
    for p in patterns:
        # Layers that are laid out alike have the same neighbouring blocks, so they share the columns.
        key = p.src_stride, p.dst_stride, p.src_token, p.dst_token, p.dimensions, p.run_bytes
        if key not in known:
            src = units.src * p.src_stride + units.src_token * p.src_token
            dst = units.dst * p.dst_stride + units.dst_token * p.dst_token
            if p.dimensions:
                shape, src_steps, dst_steps = p.steps
                src, dst = spread(src, shape, src_steps), spread(dst, shape, dst_steps)
                known[key] = src, dst, np.full(len(src), p.run_bytes, dtype=np.int64)
            else:
                known[key] = coalesce(src, dst, p.run_bytes)
        src, dst, nbytes = known[key]
        draft.columns.append((p.src + src, p.dst + dst, nbytes))


def stage(draft: Draft, patterns: Sequence[Pattern], units: Units) -> None:
    """Adds the whole blocks that these patterns read, and the strips that are copied out of the staging buffer."""
    for region in regions_of(patterns):
        begin = draft.staging_bytes
        staged = np.arange(len(units.listed), dtype=np.int64) * region.block_bytes
        src, dst, nbytes = coalesce(units.listed * region.stride_bytes, staged, region.block_bytes)
        draft.columns.append((region.offset + src, begin + dst, nbytes))
        draft.staging_bytes += len(units.listed) * region.block_bytes
        for p in patterns:
            if p.source is region:
                within = begin + p.src - region.offset
                src = within + units.place * region.block_bytes + units.src_token * p.src_token
                dst = p.dst + units.dst * p.dst_stride + units.dst_token * p.dst_token
                draft.strips.append(Strip(src, dst, *p.steps, p.run_bytes))
