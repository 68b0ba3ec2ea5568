"""Counts of values by size, cheap enough for every call."""

import time
from bisect import bisect_left
from itertools import accumulate

from kvgrpc.core.values.records import dataclass


@dataclass(frozen=True)
class Example:
    """One value with the trace that it belongs to. `at` is in seconds since the Unix epoch."""

    trace_id: str
    value: float
    at: float


class Histogram:
    """Number of values up to each bound, and above the last one, with their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.examples: dict[int, Example] = {}
        """Latest value of a trace in each bucket."""

    def observe(self, value: float, trace_id: str = "") -> None:
        """Counts a value."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += 1
        self.total += value
        if trace_id:
            self.examples[bucket] = Example(trace_id, value, time.time())

    def frozen(self) -> "FrozenHistogram":
        """Returns the counts as they are now, for another thread."""
        names = [*map(str, self.bounds), "+Inf"]
        counts = enumerate(accumulate(self.counts))
        buckets = tuple((names[bucket], count, self.examples.get(bucket)) for bucket, count in counts)
        return FrozenHistogram(buckets, self.total)


@dataclass(frozen=True)
class FrozenHistogram:
    """Counts of one moment: (bound, number of values up to it, example) of each bucket, and the sum of all values."""

    buckets: tuple[tuple[str, int, Example | None], ...]
    total: float
