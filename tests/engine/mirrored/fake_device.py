"""A fake device. Its memory is a file that is not mapped; only the device's copies read and write it.

One thread per direction runs the copies in their start order, as slowly as a test wants. A copy reads its bytes when it
runs, not when it starts.
"""

import os
import queue
import threading
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvgrpc.core.values.block_ids import Ids
from kvgrpc.engine import CopyFailed
from tests.engine.made import BLOCKS, LAYER_BYTES, LAYERS, made_bytes

WAIT_S = 30.0


@dataclass(eq=False)
class FakeCopy:
    """The copies of one call."""

    way: str
    offsets: Ids
    nbytes: Ids
    over: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def synchronize(self) -> None:
        assert self.over.wait(WAIT_S), "the test never let it go on"
        if self.error is not None:
            raise self.error


class FakeDevice:
    """A fake device of `nbytes` bytes, whose copies take `delay_s` seconds each. `copied` counts bytes by direction,
    and copies end with `errors` by direction. The next calls of `open` raise `refusals`.
    """

    def __init__(self, delay_s: float = 0.0, nbytes: int = LAYERS * BLOCKS * LAYER_BYTES) -> None:
        self.nbytes = nbytes
        self.delay_s = delay_s
        self.copied: Counter[str] = Counter()
        self.errors: dict[str, Exception] = {}
        self.refusals: list[Exception] = []
        self.opened = 0
        self._fd = os.memfd_create("device")
        os.ftruncate(self._fd, self.nbytes)
        self._mirror: NDArray[np.uint8] | None = None
        self._runs = {"out": threading.Event(), "in": threading.Event()}
        self._started = {"out": threading.Event(), "in": threading.Event()}
        for event in self._runs.values():
            event.set()
        self._queues: dict[str, queue.SimpleQueue[FakeCopy]] = {}
        for way in self._runs:
            self._queues[way] = queue.SimpleQueue()
            threading.Thread(target=self._work, args=(way,), daemon=True).start()

    # -- what kvgrpc calls

    def open(self, mirror: NDArray[np.uint8]) -> None:
        assert mirror.shape == (self.nbytes,)
        assert self._mirror is None, "it has one"
        if self.refusals:
            raise self.refusals.pop(0)
        self._mirror = mirror
        self.opened += 1

    def to_host(self, offsets: Ids, nbytes: Ids) -> FakeCopy:
        return self._start("out", offsets, nbytes)

    def to_device(self, offsets: Ids, nbytes: Ids) -> FakeCopy:
        return self._start("in", offsets, nbytes)

    def close(self) -> None:
        self._mirror = None

    @property
    def fd(self) -> int:
        """File descriptor of the device's memory."""
        return self._fd

    @property
    def has_mirror(self) -> bool:
        return self._mirror is not None

    # -- what the engine's kernels do

    def fill(self, blocks: list[int], seed: int) -> NDArray[np.uint8]:
        """Puts bytes that follow from the seed into blocks, and returns them."""
        made = made_bytes(blocks, seed)
        for layer in range(LAYERS):
            self.fill_layer(layer, blocks, made[layer])
        return made

    def fill_layer(self, layer: int, blocks: list[int], made: NDArray[np.uint8]) -> None:
        for block, kv in zip(blocks, made, strict=True):
            os.pwrite(self._fd, kv.tobytes(), _place(layer, block))

    def read(self, blocks: list[int]) -> NDArray[np.uint8]:
        found = [os.pread(self._fd, LAYER_BYTES, _place(layer, block)) for layer in range(LAYERS) for block in blocks]
        return np.frombuffer(b"".join(found), dtype=np.uint8).reshape(LAYERS, len(blocks), LAYER_BYTES)

    def write_all(self, memory: NDArray[np.uint8]) -> None:
        os.pwrite(self._fd, memory.tobytes(), 0)

    def read_all(self) -> NDArray[np.uint8]:
        return np.frombuffer(os.pread(self._fd, self.nbytes, 0), dtype=np.uint8)

    # -- what a test does

    def hold(self, way: str) -> None:
        """Holds copies in this direction: they start, but make no progress."""
        self._runs[way].clear()
        self._started[way].clear()

    def wait_started(self, way: str) -> None:
        assert self._started[way].wait(WAIT_S), f"no copy {way} was started"

    def started(self, way: str) -> bool:
        return self._started[way].is_set()

    def let_go(self, way: str) -> None:
        self._runs[way].set()

    def _start(self, way: str, offsets: Ids, nbytes: Ids) -> FakeCopy:
        assert (offsets[1:] >= (offsets + nbytes)[:-1]).all(), "sorted, and none overlaps"
        copy = FakeCopy(way, offsets, nbytes)
        self._queues[way].put(copy)
        self._started[way].set()
        return copy

    def _work(self, way: str) -> None:
        pause = threading.Event()
        while True:
            copy = self._queues[way].get()
            pause.wait(self.delay_s)
            self._runs[way].wait()
            copy.error = self.errors.get(way)
            if copy.error is None:
                self._copy(copy)
            copy.over.set()

    def _copy(self, copy: FakeCopy) -> None:
        mirror = self._mirror
        assert mirror is not None, "a copy goes on after close"
        for offset, nbytes in zip(copy.offsets.tolist(), copy.nbytes.tolist(), strict=True):
            if copy.way == "out":
                mirror[offset : offset + nbytes] = np.frombuffer(os.pread(self._fd, nbytes, offset), dtype=np.uint8)
            else:
                os.pwrite(self._fd, mirror[offset : offset + nbytes].tobytes(), offset)
            self.copied[copy.way] += nbytes


def _place(layer: int, block: int) -> int:
    return (layer * BLOCKS + block) * LAYER_BYTES


__all__ = ["CopyFailed", "FakeCopy", "FakeDevice"]
