"""Bytes of a memory as sorted runs that do not touch each other."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvgrpc.core.actions import Post
from kvgrpc.core.values.block_ids import Ids
from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.strips import spread
from kvgrpc.datapath.host.addresses import check_runs, cut, groups
from kvgrpc.datapath.mirror import lane
from kvgrpc.datapath.mirror.device import Copy


@dataclass(frozen=True, eq=False)
class Ranges:
    """Sorted runs: run i is `nbytes[i]` bytes from `offsets[i]` on. Shape [runs], int64."""

    offsets: Ids
    nbytes: Ids

    @classmethod
    def of(cls, offsets: Ids, nbytes: Ids, total_bytes: int) -> "Ranges":
        """Makes ranges of runs, and joins neighbours. Raises DataPathFailed unless all lie within `total_bytes`."""
        check_runs(Runs(offsets, offsets, nbytes), total_bytes, total_bytes)
        offsets, nbytes = offsets[nbytes > 0], nbytes[nbytes > 0]
        order = np.argsort(offsets, kind="stable")
        offsets, ends = offsets[order], (offsets + nbytes)[order]
        if not len(offsets):
            return cls(offsets, ends)
        reached = np.maximum.accumulate(ends)
        begins = np.flatnonzero(np.concatenate(([True], offsets[1:] > reached[:-1])))
        ends = reached[np.concatenate((begins[1:], [len(offsets)])) - 1]
        return cls(offsets[begins], ends - offsets[begins])

    def parts(self, part_bytes: int, most: int) -> "list[Ranges]":
        """Returns the same bytes in order, in parts of about `part_bytes` bytes, and at most `most` runs."""
        runs = cut(Runs(self.offsets, self.offsets, self.nbytes), part_bytes)
        bounds = groups(runs.nbytes, part_bytes, most)
        return [Ranges(runs.dst[first:end], runs.nbytes[first:end]) for first, end in bounds]

    def copies(self, start: Callable[[Ids, Ids], Copy]) -> Iterator[lane.Start]:
        """Yields the copies for a lane; `start` is a device's `to_host` or `to_device`."""
        for part in self.parts(lane.PIECE_BYTES, lane.PIECE_RUNS):
            yield partial(start, part.offsets, part.nbytes)

    def touches(self, other: "Ranges") -> bool:
        """Returns True if the two have a byte in common."""
        if not len(self.offsets) or not len(other.offsets):
            return False
        at = np.searchsorted(other.offsets + other.nbytes, self.offsets, side="right")
        within = at < len(other.offsets)
        return bool((other.offsets[at[within]] < (self.offsets + self.nbytes)[within]).any())


def filled_by(post: Post, total_bytes: int) -> Ranges:
    """Returns the bytes of the rank's memory that a READ fills, by its runs or by its checked re-pack."""
    if post.repack is None:
        return Ranges.of(post.runs.dst, post.runs.nbytes, total_bytes)
    places = [spread(strip.dst, strip.shape, strip.dst_steps) for strip in post.repack.strips]
    lengths = [
        np.full(len(some), strip.run_bytes, dtype=np.int64)
        for some, strip in zip(places, post.repack.strips, strict=True)
    ]
    if not places:
        return Ranges(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
    return Ranges.of(np.concatenate(places), np.concatenate(lengths), total_bytes)
