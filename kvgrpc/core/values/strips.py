"""Strips: copies of one shape at many places. A list of runs would be longer than what a re-pack moves."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np

from kvgrpc.core.values.block_ids import Ids
from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.records import dataclass

DIMENSIONS_MAX = 4
"""Maximum number of dimensions: layers, keys and values, heads, tokens."""


@dataclass(frozen=True, eq=False)
class Strip:
    """Copies of one shape. Copy i takes, for every index of `shape`, `run_bytes` bytes from `src[i]` + index *
    `src_steps` to `dst[i]` + index * `dst_steps`. `src` and `dst` are int64 of shape [copies]; `shape` has at most
    DIMENSIONS_MAX items.
    """

    src: Ids
    dst: Ids
    shape: tuple[int, ...]
    src_steps: tuple[int, ...]
    """Bytes from one index to the next, per dimension."""
    dst_steps: tuple[int, ...]
    run_bytes: int

    @property
    def runs_each(self) -> int:
        """Number of runs in one copy."""
        return prod(self.shape)

    @property
    def total_bytes(self) -> int:
        return len(self.src) * self.runs_each * self.run_bytes

    def runs(self) -> Runs:
        """Lists every run, copy by copy."""
        src, dst = spread(self.src, self.shape, self.src_steps), spread(self.dst, self.shape, self.dst_steps)
        return Runs(src, dst, np.full(len(src), self.run_bytes, dtype=np.int64))

    def ends(self) -> tuple[int, int]:
        """Returns the end of the last byte that is read, and of the last that is written. There must be a copy."""
        return int(self.src.max()) + self.extent(self.src_steps), int(self.dst.max()) + self.extent(self.dst_steps)

    def extent(self, steps: Sequence[int]) -> int:
        """Returns the bytes from the start of a copy to the end of its last run, on the side with these steps."""
        return sum((count - 1) * step for count, step in zip(self.shape, steps, strict=True)) + self.run_bytes


@dataclass(frozen=True, eq=False)
class Repack:
    """The copies by which a rank moves bytes from a staging buffer to their places.

    Sources of the strips are offsets in the buffer, destinations offsets in the rank's memory. No two runs of all
    strips write the same byte.
    """

    strips: tuple[Strip, ...]
    staging_bytes: int
    """Bytes of the buffer that the posting fills."""

    @property
    def total_bytes(self) -> int:
        return sum(strip.total_bytes for strip in self.strips)

    def at_source(self, runs: Runs) -> tuple[Strip, ...] | None:
        """Returns the strips as copies out of the memory that `runs` read into the buffer, or None if a copy is not out
        of one run.
        """
        order = np.argsort(runs.dst, kind="stable")
        begins, ends = runs.dst[order], (runs.dst + runs.nbytes)[order]
        shifts, found = (runs.src - runs.dst)[order], []
        for strip in self.strips:
            run = np.searchsorted(begins, strip.src, side="right") - 1
            if run.min() < 0 or (strip.src + strip.extent(strip.src_steps) > ends[run]).any():
                return None
            found.append(replace(strip, src=strip.src + shifts[run]))
        return tuple(found)


def spread(at: Ids, shape: Sequence[int], steps: Sequence[int]) -> Ids:
    """Returns each place of `at` with every index of `shape`, the last dimension fastest."""
    for count, step in zip(shape, steps, strict=True):
        at = (at[:, None] + np.arange(count, dtype=np.int64) * step).reshape(-1)
    return at
