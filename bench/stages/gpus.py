"""Two engines in this process, each with its own memory of one GPU, between which blocks are pulled by cuda_vmm."""

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from bench.plan import CUDA_VMM, Case, pool
from bench.stages.devices import pull_s
from bench.stages.memory import fill
from kvgrpc.datapath.base import PostingState
from kvgrpc.datapath.cuda_vmm.driver import Driver
from kvgrpc.datapath.cuda_vmm.memory import VmmMemory
from kvgrpc.datapath.host.addresses import groups, to_rows
from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.datapath.mirror import lane
from kvgrpc.datapath.mirror.lane import CopyJob, CopyLane
from kvgrpc.engine import Engine, Rank
from kvgrpc.errors import InternalError, Reason

_COPY_S = 60.0


class GpuPool(Protocol):
    """Memory of a GPU of which peers get descriptors."""

    @property
    def driver(self) -> Driver: ...

    @property
    def tensor(self) -> Any:
        """The memory as an engine has it, of shape [nbytes]."""
        ...

    def write(self, whole: NDArray[np.uint8]) -> None: ...

    def read(self) -> NDArray[np.uint8]: ...

    def close(self) -> None: ...


class CudaPool:
    """Memory of the first GPU. Raises the errors of CudaMemory, and InternalError if the driver makes no such
    memory.
    """

    def __init__(self, nbytes: int) -> None:
        from kvgrpc.engine.cuda_memory import CudaMemory

        made = CudaMemory("cuda:0", nbytes, exported=True)
        if not isinstance(made.memory, VmmMemory):
            made.close()
            raise InternalError(
                Reason.INTERNAL, "the driver makes no memory of which peers get descriptors: see the log"
            )
        self._memory, self.tensor = made, made.tensor
        self.driver = made.memory.driver

    def write(self, whole: NDArray[np.uint8]) -> None:
        import torch

        self.tensor.copy_(torch.from_numpy(whole))
        torch.cuda.synchronize("cuda:0")

    def read(self) -> NDArray[np.uint8]:
        (whole,) = self._memory.read([(0, self.tensor.numel())])
        return np.frombuffer(whole, dtype=np.uint8)

    def close(self) -> None:
        self._memory.close()


class GpuEngines:
    """Two engines with memory of one GPU. Use it as a context manager."""

    def __init__(self, case: Case, make: Callable[[int], GpuPool]) -> None:
        layout = pool(case.block_bytes, case.blocks).layout()
        self._case = case
        self._blocks = case.ids("source"), case.ids("destination")
        flags = ["--data-paths", CUDA_VMM]
        with contextlib.ExitStack() as ends:
            self._pools: list[GpuPool] = []
            self._engines: list[Engine] = []
            for _ in range(2):
                made = make(layout.total_bytes)
                ends.callback(made.close)
                engine = ends.enter_context(
                    Engine.launch(flags=flags, pool=layout, weights_revision="bench", private_memory=True)
                )
                ends.enter_context(Rank(engine.ticket, tensors=[made.tensor], data_paths=(CUDA_VMM,)))
                self._pools.append(made)
                self._engines.append(engine)
            source, destination = (PrivateMemory.of(made.tensor).segments for made in self._pools)
            self._rows = to_rows(case.runs(), source, destination, lane.PIECE_BYTES)
            self._device = destination[0].device
            self._lane = CopyLane("kvgrpc-bench-between")
            ends.callback(self._close_lane)
            self._ends = ends.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def check(self) -> None:
        """Checks that a pull brings what the source has. Raises InternalError if not."""
        source, destination = self._pools
        written = source.read().copy()
        fill(written)
        source.write(written)
        self.pull_s()
        given, taken = self._blocks
        if not np.array_equal(self._of(given, written), self._of(taken, destination.read())):
            raise InternalError(Reason.INTERNAL, "the destination has other bytes than were to move")

    def pull_s(self) -> float:
        """Returns the seconds from the hand-over to the event Received."""
        source, destination = self._engines
        return pull_s(source, destination, self._blocks)

    def copy_s(self) -> float:
        """Returns the seconds of the driver's copies of the same runs alone, in pieces like those of a posting."""
        ended = threading.Event()
        driver, began = self._pools[1].driver, time.monotonic()
        ranges = groups(self._rows[:, 2], lane.PIECE_BYTES, lane.PIECE_RUNS)
        job = CopyJob((partial(driver.copy, self._device, self._rows[first:end]) for first, end in ranges), ended.set)
        self._lane.copy(job)
        if not ended.wait(_COPY_S) or job.poll() is not PostingState.DONE:
            raise InternalError(Reason.INTERNAL, f"the device did not copy: {job.error or 'it does not end'}")
        return time.monotonic() - began

    def _close_lane(self) -> None:
        self._lane.stop()
        if not self._lane.at_rest(_COPY_S):
            raise InternalError(Reason.INTERNAL, "the device may still copy: end this process")

    def _of(self, blocks: NDArray[np.int64], whole: NDArray[np.uint8]) -> NDArray[np.uint8]:
        size = self._case.block_bytes
        rows: NDArray[np.uint8] = whole[: len(whole) // size * size].reshape(-1, size)[blocks]
        return rows
