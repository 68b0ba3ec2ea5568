"""Counts of values by size, cheap enough for every call, and the bounds of all buckets."""

import time
from bisect import bisect_left
from itertools import accumulate

from kvgrpc.core.values.records import dataclass

TIME_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
AGE_BOUNDS_S = (1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1_800.0)
CALL_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""Bounds that OpenTelemetry recommends for calls."""
SIZE_BOUNDS = tuple(float(1 << power) for power in range(11, 34, 2))
"""Bounds of sizes in bytes: those that engines chart for their own connectors, every second one."""


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
