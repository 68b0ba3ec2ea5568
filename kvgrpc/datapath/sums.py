"""The threads that sum up blocks of a rank's memory, beside those that move bytes: nobody else waits for them."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvgrpc.core.chunks import Pieces
from kvgrpc.core.descriptors import Ids
from kvgrpc.datapath.base import Memory
from kvgrpc.datapath.crc32c import Plan, Summer
from kvgrpc.datapath.reports import Summed
from kvgrpc.errors import KVGrpcError

_log = logging.getLogger(__name__)


def in_order_of_addresses(pieces: Pieces) -> tuple[Pieces, Ids]:
    """The same sums in the order of where they begin, and the place of each among those given.

    Blocks of a request lie anywhere in a pool. From there 16 KB blocks are summed up at 6 GB/s, and at 8 in order; at
    20 where they are neighbours. Sums over different numbers of pieces keep their order.
    """
    count = len(pieces.counts)
    each = len(pieces.offsets) // max(count, 1)
    if not each or len(pieces.offsets) != count * each or (pieces.counts != each).any():
        return pieces, np.arange(count)
    offsets, nbytes = pieces.offsets.reshape(count, each), pieces.nbytes.reshape(count, each)
    places: Ids = np.argsort(offsets[:, 0], kind="stable")
    return Pieces(offsets[places].ravel(), nbytes[places].ravel(), pieces.counts), places


class Sums:
    """Sums up what it is asked for; `report` gets one Summed for each, from any thread."""

    def __init__(self, rank: int, memory: Memory, threads: int, report: Callable[[Summed], None]) -> None:
        self._memory = memory
        self._report = report
        self._threads = ThreadPoolExecutor(threads, f"kvgrpc-sum-{rank}")
        self._summer: Summer | None = None

    def start(self, name: str, pieces: Pieces) -> None:
        """Never blocks. Pieces that do not lie in the memory are an error of the report."""
        try:
            summer = self._summer = self._summer or Summer(self._memory.segments)
            pieces, places = in_order_of_addresses(pieces)
            plan = summer.plan(pieces)
        except KVGrpcError as error:
            self._report(Summed(name, b"", error.message))
            return
        if not plan.slices:
            self._report(Summed(name, b""))
            return
        job = _Job(name, summer, plan, places, self._report)
        try:
            for first, end in plan.slices:
                self._threads.submit(job.run, first, end)
        except RuntimeError:  # closed: nobody is left to care
            _log.debug("the rank is closed; %s is not summed up", name)

    def close(self) -> None:
        """Ends the threads, after the slice that each is at; what is left is never reported. Idempotent."""
        self._threads.shutdown(wait=True, cancel_futures=True)


class _Job:
    """What was asked for once, slice by slice."""

    def __init__(self, name: str, summer: Summer, plan: Plan, places: Ids, report: Callable[[Summed], None]) -> None:
        self._name = name
        self._summer = summer
        self._plan = plan
        self._places = places
        self._report = report
        self._lock = threading.Lock()
        self._left = len(plan.slices)
        self._error = ""

    def run(self, first: int, end: int) -> None:
        """Sums up one slice; the last one to end reports."""
        try:
            self._summer.sum(self._plan, first, end)
        except Exception as error:  # noqa: BLE001 - whatever it is, it fails these sums only
            _log.exception("%s could not be summed up", self._name)
            self._error = self._error or f"{type(error).__name__}: {error}"
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._report(Summed(self._name, b"" if self._error else self._values(), self._error))

    def _values(self) -> bytes:
        """In the order in which they were asked for; uint32, little-endian."""
        values = np.empty(len(self._places), dtype="<u4")
        values[self._places] = self._plan.values
        return values.tobytes()
