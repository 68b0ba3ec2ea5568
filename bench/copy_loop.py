"""The baseline of every copy: memcpy called for one run after the other, by several threads.

The loop is compiled: a loop in Python would lose so much time between two short runs that any data path would look good
beside it. Without a compiled loop it is a loop in Python, and `LoopCopier.why` says so.
"""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Self

import numpy as np

from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.datapath.base import Memory
from kvgrpc.datapath.copy.rows import row_function
from kvgrpc.datapath.host import libc
from kvgrpc.datapath.host.addresses import Rows, groups, to_rows

_PIECE_BYTES = 4 << 20  # maximum piece of a thread, in bytes, so that all threads end together


class LoopCopier:
    """Copies `rows` with `threads` threads. Use it as a context manager."""

    def __init__(self, rows: Rows, threads: int) -> None:
        self._copy = row_function("kvgrpc_memcpy_rows") or _in_python
        self._threads = ThreadPoolExecutor(threads, "memcpy")
        bounds = groups(rows[:, 2], _PIECE_BYTES, len(rows))
        self._pieces = [np.ascontiguousarray(rows[first:end]) for first, end in bounds]
        started = Barrier(threads)
        list(self._threads.map(lambda _: started.wait(), range(threads)))

    @property
    def why(self) -> str:
        """The way of copying, as text."""
        return "a loop in Python" if self._copy is _in_python else "a native loop"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def copy(self) -> None:
        """Copies every run; all bytes are there when it returns."""
        list(self._threads.map(self._copy, self._pieces))


def rows_of(runs: Runs, source: Memory, destination: Memory) -> Rows:
    """Returns the rows that a LoopCopier needs to copy `runs` of `source` into `destination`."""
    return to_rows(runs, source.segments, destination.segments, _PIECE_BYTES)


def _in_python(rows: Rows) -> None:
    for destination, source, nbytes in rows.tolist():
        libc.memmove(destination, source, nbytes)
