"""Copies rows (destination address, source address, bytes) within this process, by three methods.

* `STREAM`: many rows in one call, past the processor's cache: `kvgrpc_copy_rows` of `rows.c`. The fastest at every
  length; exists if the package was installed with a C compiler.
* `KERNEL`: process_vm_readv on this very process, 1,024 rows a call. The kernel copies more slowly
  than memmove, so it wins only for short rows.
* `LOOP`: memmove, called from Python for each row.

All three release the interpreter lock while bytes move. A loop has to win it back after every row, which costs as much
as copying 8 KB, and milliseconds beside a thread that runs Python.

The speed of copies of short runs is bound by the time between two runs. The bytes of a KV block are also not read soon
after the copy, yet the C library's memmove first loads every line that it is about to overwrite (it streams only above
some 200 MB): a third of the memory traffic.
"""

import functools
import os
from collections.abc import Callable
from enum import Enum

import numpy as np

from kvgrpc.datapath.copy.rows import row_function
from kvgrpc.datapath.host import libc
from kvgrpc.datapath.host.addresses import Rows


@functools.cache
def stream_copier() -> Callable[[Rows], None] | None:
    """Returns the function that copies rows which do not overlap; None if the library was not built."""
    return row_function("kvgrpc_copy_rows")


CopyRows = Callable[[Rows], None]

# Row length below which one kernel call per 1,024 rows beats one memmove per row from Python, as measured.
KERNEL_ROW_BYTES = 16 << 10


class CopyMethod(Enum):
    """A method to copy rows; see the module's docstring."""

    # Identity is enough, and Enum's own hash is slow, as in `timers.Timer`.
    __hash__ = object.__hash__

    STREAM = "stream"
    KERNEL = "kernel"
    LOOP = "loop"

    @property
    def why(self) -> str:
        """Description for people, as part of a sentence."""
        return _WHY[self]


_WHY = {
    CopyMethod.STREAM: "streaming stores, many runs a call",
    CopyMethod.KERNEL: f"process_vm_readv, {libc.IOV_MAX} runs a call",
    CopyMethod.LOOP: "memmove, one call a run",
}


def best(row_bytes: float) -> CopyMethod:
    """Returns the fastest method that works here, for rows of `row_bytes` bytes on average."""
    if copier(CopyMethod.STREAM) is not None:
        return CopyMethod.STREAM
    if row_bytes < KERNEL_ROW_BYTES and copier(CopyMethod.KERNEL) is not None:
        return CopyMethod.KERNEL
    return CopyMethod.LOOP


@functools.cache
def copier(method: CopyMethod) -> CopyRows | None:
    """Returns the function that copies rows by `method`, tried out once; None if it does not work."""
    if method is CopyMethod.LOOP:
        return _copy_in_loop
    copy = _copy_by_kernel if method is CopyMethod.KERNEL else stream_copier()
    return copy if copy is not None and _copies(copy) else None


def _copy_in_loop(rows: Rows) -> None:
    move = libc.memmove
    for destination, source, nbytes in rows.tolist():
        move(destination, source, nbytes)


def _copy_by_kernel(rows: Rows) -> None:
    pid = os.getpid()
    for first in range(0, len(rows), libc.IOV_MAX):
        batch = rows[first : first + libc.IOV_MAX]
        local = np.ascontiguousarray(batch[:, [0, 2]])
        remote = np.ascontiguousarray(batch[:, [1, 2]])
        copied = libc.process_vm_readv(pid, local.ctypes.data, remote.ctypes.data, len(batch))
        if copied != int(batch[:, 2].sum()):
            # The kernel may end a call early at 2 GB, without an error.
            _copy_in_loop(batch)


def _copies(copy: CopyRows) -> bool:
    """Returns True if rows arrive, short and long, aligned and not, and nothing beside them changes."""
    source = np.arange(1 << 14, dtype=np.uint32).view(np.uint8)
    destination = np.zeros(len(source), dtype=np.uint8)
    line = -destination.ctypes.data % 64  # the first whole cache line
    rows = np.array(
        [(line, 40, 4096), (line + 4160, 8000, 1024), (line + 5185, 77, 3001), (9001, 1, 7)], dtype=np.int64
    )
    expected = destination.copy()
    for to, start, nbytes in rows.tolist():
        expected[to : to + nbytes] = source[start : start + nbytes]
    rows[:, 0] += destination.ctypes.data
    rows[:, 1] += source.ctypes.data
    try:
        copy(rows)
    except OSError:  # process_vm_readv may be forbidden, by a container's seccomp for example
        return False
    return bool((destination == expected).all())
