"""Copies of one shape at many places. A re-pack lists them so: run by run it would be longer than what it moves."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from kvgrpc.core.values.descriptors import Ids, Runs

DIMENSIONS_MAX = 4
"""Layers, keys and values, heads, tokens."""


@dataclass(frozen=True, eq=False)
class Strip:
    """Copy i takes, for every index of `shape`, `run_bytes` bytes from `src[i]` + index * `src_steps` to `dst[i]` +
    index * `dst_steps`. `src` and `dst` have shape [copies], int64; `shape` has DIMENSIONS_MAX entries at most.
    """

    src: Ids
    dst: Ids
    shape: tuple[int, ...]
    src_steps: tuple[int, ...]
    """Bytes from one index to the next, of each dimension."""
    dst_steps: tuple[int, ...]
    run_bytes: int

    @property
    def runs_each(self) -> int:
        """Runs of one copy."""
        return prod(self.shape)

    @property
    def total_bytes(self) -> int:
        return len(self.src) * self.runs_each * self.run_bytes

    def runs(self) -> Runs:
        """Lists every run, copy by copy."""
        src, dst = spread(self.src, self.shape, self.src_steps), spread(self.dst, self.shape, self.dst_steps)
        return Runs(src, dst, np.full(len(src), self.run_bytes, dtype=np.int64))

    def ends(self) -> tuple[int, int]:
        """Where the last byte that is read ends, and the last that is written. There is at least one copy."""
        src, dst = (
            sum((n - 1) * step for n, step in zip(self.shape, steps, strict=True)) + self.run_bytes
            for steps in (self.src_steps, self.dst_steps)
        )
        return int(self.src.max()) + src, int(self.dst.max()) + dst


@dataclass(frozen=True, eq=False)
class Repack:
    """What a rank does with bytes that it has read into a staging buffer: it copies them to where they belong.

    Sources of the strips are offsets in the buffer, destinations offsets in the rank's memory. No two runs of all
    strips write the same byte.
    """

    strips: tuple[Strip, ...]
    staging_bytes: int
    """Bytes of the buffer that the posting fills."""

    @property
    def total_bytes(self) -> int:
        return sum(strip.total_bytes for strip in self.strips)


def spread(at: Ids, shape: Sequence[int], steps: Sequence[int]) -> Ids:
    """Each place of `at` with every index of `shape`, the last dimension fastest."""
    for count, step in zip(shape, steps, strict=True):
        at = (at[:, None] + np.arange(count, dtype=np.int64) * step).reshape(-1)
    return at
