"""Counts of what happened at a lead: transfers that ended, and delays of the event loop.

Everything else is read from the node when Prometheus asks. All of it runs on the event loop.
"""

import asyncio
from collections import Counter, defaultdict

from kvgrpc.core.tables.transfers import ENDED, Direction, State, Transfer
from kvgrpc.service.histogram import SIZE_BOUNDS, TIME_BOUNDS_S, Histogram
from kvgrpc.wire.answers import trace_id

LAG_EVERY_S = 1.0
"""Interval between two measurements of the event loop's delay, in seconds."""
RENDEZVOUS = "rendezvous"
"""Name of the first phase of a push, on both sides."""


class TransferRecords:
    """Ends of transfers. `data_paths`: those that the operator named, the first choice first.

    What has a known set of labels begins at 0, so that Prometheus sees the first increase.
    """

    def __init__(self, data_paths: tuple[str, ...]) -> None:
        self._first_path, *others = data_paths
        outcomes = [state.value for state in ENDED]
        self.ends = Counter(
            {(way.value, mode, outcome): 0 for way in Direction for mode in ("pull", "push") for outcome in outcomes}
        )
        """Number by direction, mode and outcome."""
        self.failures: Counter[tuple[str, str]] = Counter()
        """Number by direction and reason."""
        self.slow = Counter({(path,): 0 for path in others})
        """Number of received transfers by a data path that was not the first choice."""
        self.seconds: dict[tuple[str, str], Histogram] = defaultdict(lambda: Histogram(TIME_BOUNDS_S))
        self.phases: dict[tuple[str, str], Histogram] = defaultdict(lambda: Histogram(TIME_BOUNDS_S))
        self.sizes: dict[tuple[str], Histogram] = defaultdict(lambda: Histogram(SIZE_BOUNDS))

    def hear(self, transfer: Transfer) -> None:
        assert transfer.ended is not None
        direction, trace = transfer.direction.value, trace_id(transfer.trace)
        phases = transfer.phases
        mode = "push" if phases and phases[0].name == RENDEZVOUS else "pull"
        self.ends[direction, mode, transfer.state.value] += 1
        if transfer.failure is not None and transfer.state is State.FAILED:
            self.failures[direction, transfer.failure.reason.value] += 1
        self.seconds[direction, mode].observe(transfer.ended - transfer.created, trace)
        for phase in phases:
            end = transfer.ended if phase.end is None else phase.end
            self.phases[direction, phase.name].observe(end - phase.start, trace)
        if transfer.direction is Direction.RECEIVE and transfer.paths:
            path = transfer.paths[0].path.data_path
            self.sizes[(path,)].observe(transfer.nbytes_done, trace)
            if path != self._first_path:
                self.slow[(path,)] += 1


class LoopLag:
    """Delay of timers of the running loop."""

    def __init__(self) -> None:
        self.seconds = Histogram(TIME_BOUNDS_S)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(loop.time() + LAG_EVERY_S, self._measure)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _measure(self) -> None:
        assert self._timer is not None
        self.seconds.observe(max(asyncio.get_running_loop().time() - self._timer.when(), 0.0))
        self.start()
