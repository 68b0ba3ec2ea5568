"""Runs of bytes from one memory to another, as arrays: 65,536 blocks cost milliseconds."""

from functools import cached_property

import numpy as np

from kvgrpc.core.values.block_ids import Ids
from kvgrpc.core.values.records import dataclass


@dataclass(frozen=True, eq=False)
class Runs:
    """Byte runs to copy: run i is `nbytes[i]` bytes from source offset `src[i]` to destination offset `dst[i]`.

    Offsets are in the rank's linear memory (`PoolLayout.total_bytes` bytes), shape [n], int64.
    """

    src: Ids
    dst: Ids
    nbytes: Ids

    @cached_property
    def total_bytes(self) -> int:
        return int(self.nbytes.sum())

    def __len__(self) -> int:
        return len(self.nbytes)

    def split(self, most: int) -> "tuple[Runs, Runs | None]":
        """Returns the first `most` bytes and the rest, or None for the rest if there is none."""
        if self.total_bytes <= most:
            return self, None
        ends = np.cumsum(self.nbytes)
        at = int(np.searchsorted(ends, most, side="right"))
        room = most - (int(ends[at - 1]) if at else 0)
        cut = np.array([room] if room else [], dtype=np.int64)
        src, dst, nbytes = self.src[at:].copy(), self.dst[at:].copy(), self.nbytes[at:].copy()
        src[0] += room
        dst[0] += room
        nbytes[0] -= room
        first = Runs(self.src[: at + len(cut)], self.dst[: at + len(cut)], np.concatenate((self.nbytes[:at], cut)))
        return first, Runs(src, dst, nbytes)


def coalesce(src: Ids, dst: Ids, nbytes: int) -> tuple[Ids, Ids, Ids]:
    """Returns sources, destinations and lengths of runs of `nbytes` each, joined where both sides are neighbours."""
    if len(src) <= 1:
        return src, dst, np.full(len(src), nbytes, dtype=np.int64)
    joined = (np.diff(src) == nbytes) & (np.diff(dst) == nbytes)
    if not joined.any():
        return src, dst, np.full(len(src), nbytes, dtype=np.int64)
    first = np.concatenate(([0], np.flatnonzero(~joined) + 1))
    lengths: Ids = np.diff(np.concatenate((first, [len(src)]))) * nbytes
    return src[first], dst[first], lengths
