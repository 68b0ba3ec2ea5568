"""Two engines in this process, each with its own ranks, of which one pulls from the other over sessions."""

import contextlib
import secrets
import time
from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bench.copy_loop import LoopCopier, rows_of
from bench.geometries import Geometry
from bench.plan import environment_of, path_of
from bench.stages.engines import environment, next_event
from bench.stages.memory import fill, lists
from kvgrpc.core.values.bridge import Bridge
from kvgrpc.core.values.plans import PairRuns
from kvgrpc.datapath.host.addresses import Rows
from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.engine import BlocksReturned, Engine, Rank, Received, content
from kvgrpc.errors import InternalError, Reason

Memories = Sequence[NDArray[np.uint8]]


class UnlikeEngines:
    """Both engines of a geometry. Use it as a context manager."""

    def __init__(self, data_path: str, geometry: Geometry, copy_threads: int) -> None:
        """Starts two leads that move over one data path, with shared memory for every rank."""
        sides = geometry.source, geometry.destination
        self._threads = (1 if path_of(data_path) == "nixl" else copy_threads) * geometry.destination.ranks
        self._content = content(opaque_id=b"python -m bench", tokens=geometry.tokens)
        self._blocks = [geometry.blocks(number) for number in (0, 1)]
        self.planned = Bridge(*sides, 1).plan([geometry.chunk()])
        """The runs that must arrive."""
        flags = ["--data-paths", path_of(data_path), "--copy-threads", str(copy_threads)]
        with contextlib.ExitStack() as ends:
            with environment(environment_of(data_path)):
                self._source, self._destination = (
                    ends.enter_context(
                        Engine.launch(flags=flags, pool=side.pool, world_size=side.ranks, weights_revision="bench")
                    )
                    for side in sides
                )
            self._memories = [
                [ends.enter_context(Rank(engine.ticket, rank)).memory for rank in range(side.ranks)]
                for engine, side in zip((self._source, self._destination), sides, strict=True)
            ]
            rows = [self._rows(some) for some in self.planned]
            self._copier = ends.enter_context(LoopCopier(np.concatenate(rows), self._threads))
            self._ends = ends.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    @property
    def nbytes(self) -> int:
        """Number of bytes that arrive, over all ranks."""
        return sum(some.total_bytes for some in self.planned)

    def check(self) -> None:
        """Checks that a pull brings the same bytes as a copy run by run. Raises InternalError if not."""
        self._fill()
        self.copy_s()
        expected = [memory.copy() for memory in self._memories[1]]
        for memory in self._memories[1]:
            memory[:] = 0
        self.pull_s()
        for rank, (memory, wanted) in enumerate(zip(self._memories[1], expected, strict=True)):
            if not np.array_equal(memory, wanted):
                raise InternalError(Reason.INTERNAL, f"rank {rank} has other bytes than were to move")

    def pull_s(self) -> float:
        """Returns the seconds from the call of a pull to the event Received."""
        here, there = (lists(*blocks) for blocks in self._blocks)
        handed = self._source.finished_blocks(here, self._content, transfer_key=secrets.token_bytes(16))
        self._source.flush()
        began = time.monotonic()
        self._destination.pull(handed.grant, self._content).start(there)
        self._destination.flush()
        next_event(self._destination, Received)
        woken = time.monotonic()
        next_event(self._source, BlocksReturned)
        return woken - began

    def copy_s(self) -> float:
        """Returns the seconds of a memcpy of every run of every pair."""
        began = time.monotonic()
        self._copier.copy()
        return time.monotonic() - began

    def _rows(self, some: PairRuns) -> Rows:
        source, destination = self._memories[0][some.pair.source_rank], self._memories[1][some.pair.rank]
        return rows_of(some.runs, PrivateMemory.of(source), PrivateMemory.of(destination))

    def _fill(self) -> None:
        """Gives every eight bytes of the source a distinct value, and clears the destination."""
        for rank, memory in enumerate(self._memories[0]):
            fill(memory, rank * (len(memory) // 8))
        for memory in self._memories[1]:
            memory[:] = 0
