"""Runs of bytes out of patterns and lists of blocks: what each pair of ranks moves."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvgrpc.core.values.descriptors import Ids, Runs, coalesce
from kvgrpc.core.values.layout import Region
from kvgrpc.core.values.patterns import Pattern
from kvgrpc.core.values.strips import Repack, Strip, spread


class Pair(NamedTuple):
    """Two ranks between which bytes move."""

    rank: int
    """The destination's."""
    source_rank: int

    @property
    def turned(self) -> tuple[int, int]:
        """The source's rank first."""
        return self.source_rank, self.rank


@dataclass(frozen=True, eq=False)
class PairRuns:
    """What one pair moves for one posting."""

    pair: Pair
    runs: Runs
    repack: Repack | None = None
    """None: the runs end where the bytes belong. Else in the staging buffer."""

    @property
    def total_bytes(self) -> int:
        """Bytes that arrive in the destination's blocks."""
        return self.runs.total_bytes if self.repack is None else self.repack.total_bytes


class Units(NamedTuple):
    """What a chunk moves of one group, unit by unit in token order. Shapes [units]."""

    src: Ids
    dst: Ids
    """Its block at the destination."""
    src_token: Ids | int
    """The token of its block with which it begins."""
    dst_token: Ids | int
    listed: Ids
    """The blocks of the source that it needs, each once; shape [blocks]."""
    place: Ids
    """Which of them."""


_Columns = tuple[Ids, Ids, Ids]
"""Source and destination offsets, and lengths, of runs."""


@dataclass(eq=False)
class Draft:
    """A piece that is being planned."""

    columns: list[_Columns] = field(default_factory=list)
    strips: list[Strip] = field(default_factory=list)
    staging_bytes: int = 0

    def runs(self) -> Runs:
        """All of them, of which there are some."""
        if len(self.columns) == 1:
            return Runs(*self.columns[0])
        return Runs(*(np.concatenate(column) for column in zip(*self.columns, strict=True)))


def regions_of(patterns: Sequence[Pattern]) -> list[Region]:
    """The regions of the source that they read, each once."""
    return list({id(pattern.source): pattern.source for pattern in patterns}.values())


def list_runs(draft: Draft, patterns: Sequence[Pattern], units: Units) -> None:
    """Adds the runs of these patterns."""
    known: dict[tuple[object, ...], _Columns] = {}
    for p in patterns:
        # Which blocks are neighbours is the same in all layers that are laid out alike.
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
    """Adds the whole blocks that these patterns read, and what is copied from there."""
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
