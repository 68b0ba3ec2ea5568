"""Two engines in this process, one of them with a device behind a mirror, between which blocks are pulled."""

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bench.plan import BLOCK_TOKENS, Case, environment_of, path_of, pool
from bench.stages.engines import environment, next_event
from bench.stages.memory import fill, lists
from kvgrpc.core.values.block_ids import Ids
from kvgrpc.datapath.base import PostingState
from kvgrpc.datapath.mirror.lane import CopyJob, CopyLane
from kvgrpc.datapath.mirror.ranges import Ranges
from kvgrpc.engine import BlocksReturned, Device, Engine, Rank, Received, content
from kvgrpc.errors import InternalError, Reason

_COPY_S = 60.0
_REST_S = 60.0
MakeDevices = Callable[[int], tuple[Device, Device]]
"""Makes two views of one device's memory, of that many bytes: one for the rank, one for the copies beside it."""


def pull_s(source: Engine, destination: Engine, blocks: tuple[Ids, Ids]) -> float:
    """Returns the seconds of a pull of source blocks into destination blocks, from the hand-over to the event
    Received.
    """
    given, taken = map(lists, blocks)
    what = content(opaque_id=b"python -m bench", tokens=len(blocks[0]) * BLOCK_TOKENS)
    began = time.monotonic()
    handed = source.finished_blocks(given, what, transfer_key=secrets.token_bytes(16))
    source.flush()
    destination.pull(handed.grant, what).start(taken)
    destination.flush()
    next_event(destination, Received)
    woken = time.monotonic()
    next_event(source, BlocksReturned)
    return woken - began


class DeviceEngines:
    """Two engines, one with a device, the source (`out`) or the destination; the other has shared memory. Use it as a
    context manager.
    """

    def __init__(self, case: Case, make: MakeDevices, *, out: bool) -> None:
        layout = pool(case.block_bytes, case.blocks).layout()
        self._out = out
        self._blocks = case.ids("source"), case.ids("destination")
        device, self._beside = make(layout.total_bytes)
        self._array = np.zeros(layout.total_bytes, dtype=np.uint8)
        mine = self._blocks[0 if out else 1] * case.block_bytes
        self._ranges = Ranges.of(mine, np.full(case.blocks, case.block_bytes, dtype=np.int64), layout.total_bytes)
        self._block_bytes = case.block_bytes
        flags = ["--data-paths", path_of(case.data_path), "--copy-threads", str(case.threads)]
        with contextlib.ExitStack() as ends:
            with environment(environment_of(case.data_path)):
                self._source, self._destination = (
                    ends.enter_context(
                        Engine.launch(flags=flags, pool=layout, weights_revision="bench", mirrored=mirrored)
                    )
                    for mirrored in (out, not out)
                )
            with_device, shared = (self._source, self._destination) if out else (self._destination, self._source)
            paths = (path_of(case.data_path),)
            ends.enter_context(Rank(with_device.ticket, device=device, data_paths=paths, copy_threads=case.threads))
            self._memory = ends.enter_context(Rank(shared.ticket)).memory
            self._beside.open(self._array)
            self._lanes = {True: CopyLane("kvgrpc-bench-out"), False: CopyLane("kvgrpc-bench-in")}
            ends.callback(self._close_beside)
            self._ends = ends.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def check(self) -> None:
        """Checks that a pull brings what the source has. Raises InternalError if not."""
        fill(self._array if self._out else self._memory)
        if self._out:
            self.copy_s(out=False)
        self.pull_s()
        if not self._out:
            self.copy_s(out=True)
        held = (self._array, self._memory) if self._out else (self._memory, self._array)
        source, destination = (self._rows(memory, ids) for memory, ids in zip(held, self._blocks, strict=True))
        if not np.array_equal(source, destination):
            raise InternalError(Reason.INTERNAL, "the destination has other bytes than were to move")

    def pull_s(self) -> float:
        """Returns the seconds from the hand-over to the event Received."""
        return pull_s(self._source, self._destination, self._blocks)

    def copy_s(self, *, out: bool | None = None) -> float:
        """Returns the seconds of the copies between device and host memory alone, by default in the direction of the
        pull.
        """
        ended = threading.Event()
        out = self._out if out is None else out
        start = self._beside.to_host if out else self._beside.to_device
        job, began = CopyJob(self._ranges.copies(start), ended.set), time.monotonic()
        self._lanes[out].copy(job)
        if not ended.wait(_COPY_S) or job.poll() is not PostingState.DONE:
            raise InternalError(Reason.INTERNAL, f"the device did not copy: {job.error or 'it does not end'}")
        return time.monotonic() - began

    def _close_beside(self) -> None:
        """Releases the second view, once its copies are over. Raises InternalError if they do not end."""
        for lane in self._lanes.values():
            lane.stop()
        if not all(lane.at_rest(_REST_S) for lane in self._lanes.values()):
            raise InternalError(Reason.INTERNAL, "the device may still copy: end this process")
        self._beside.close()

    def _rows(self, memory: NDArray[np.uint8], ids: Ids) -> NDArray[np.uint8]:
        rows: NDArray[np.uint8] = memory[: len(memory) // self._block_bytes * self._block_bytes].reshape(
            -1, self._block_bytes
        )
        return rows[ids]
