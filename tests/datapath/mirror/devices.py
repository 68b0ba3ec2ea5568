"""A device whose copies end when a test says so."""

import queue
import threading

import numpy as np
from numpy.typing import NDArray

from kvgrpc.core.values.block_ids import Ids

NBYTES = 1 << 16
WAIT_S = 20.0


class Call:
    """One copy that was started; it ends when the test says so."""

    def __init__(self, way: str, offsets: Ids, nbytes: Ids) -> None:
        self.way, self.offsets, self.nbytes = way, offsets.tolist(), nbytes.tolist()
        self.error: Exception | None = None
        self._over = threading.Event()

    def end(self, error: Exception | None = None) -> None:
        self.error = error
        self._over.set()

    def synchronize(self) -> None:
        assert self._over.wait(WAIT_S)
        if self.error is not None:
            raise self.error


class Device:
    nbytes = NBYTES

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self.refuses: Exception | None = None
        self.closed: list[str] = []

    def open(self, mirror: NDArray[np.uint8]) -> None:
        assert mirror.shape == (NBYTES,)

    def to_host(self, offsets: Ids, nbytes: Ids) -> Call:
        return self._start("out", offsets, nbytes)

    def to_device(self, offsets: Ids, nbytes: Ids) -> Call:
        return self._start("in", offsets, nbytes)

    def close(self) -> None:
        self.closed.append("closed")

    def next(self) -> Call:
        return self.calls.get(timeout=WAIT_S)

    def _start(self, way: str, offsets: Ids, nbytes: Ids) -> Call:
        if self.refuses is not None:
            raise self.refuses
        made = Call(way, offsets, nbytes)
        self.calls.put(made)
        return made
