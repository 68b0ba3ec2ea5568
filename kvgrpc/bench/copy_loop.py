"""The baseline of every copy: memcpy called for one run after the other, by several threads.

The loop is 65 bytes of x86-64 machine code, since a loop in Python would lose so much between two short runs that any
data path looked good beside it. Elsewhere it is a loop in Python, and `LoopCopier.why` says so.
"""

import mmap
import platform
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Self

import numpy as np

from kvgrpc.core.values.descriptors import Runs
from kvgrpc.datapath.base import Memory
from kvgrpc.datapath.host import libc
from kvgrpc.datapath.host.addresses import Rows, groups, to_rows

_PIECE_BYTES = 4 << 20  # what a thread takes at a time, so that all end together

# void copy_rows(const int64_t (*rows)[3], uint64_t count, void *(*memcpy)(void *, void *, size_t))
# Calling convention of System V. Each line: bytes, listing.
_LOOP = """
f30f1efa        endbr64
55              push rbp
4889e5          mov rbp, rsp
53              push rbx
4154            push r12
4155            push r13
4883ec08        sub rsp, 8
4889fb          mov rbx, rdi
4989f4          mov r12, rsi
4989d5          mov r13, rdx
4d85e4          test r12, r12
7417            je done
                next:
488b3b          mov rdi, [rbx]
488b7308        mov rsi, [rbx + 8]
488b5310        mov rdx, [rbx + 16]
41ffd5          call r13
4883c318        add rbx, 24
49ffcc          dec r12
75e9            jne next
                done:
4883c408        add rsp, 8
415d            pop r13
415c            pop r12
5b              pop rbx
5d              pop rbp
c3              ret
"""


class LoopCopier:
    """Copies `runs` of `source` into `destination` with `threads` threads. Use it as a context manager."""

    def __init__(self, runs: Runs, source: Memory, destination: Memory, threads: int) -> None:
        self._copy = _native() or _in_python
        self._threads = ThreadPoolExecutor(threads, "memcpy")
        rows = to_rows(runs, source.segments, destination.segments, _PIECE_BYTES)
        bounds = groups(rows[:, 2], _PIECE_BYTES, len(rows))
        self._pieces = [np.ascontiguousarray(rows[first:end]) for first, end in bounds]
        started = Barrier(threads)
        list(self._threads.map(lambda _: started.wait(), range(threads)))

    @property
    def why(self) -> str:
        """How it copies, for people."""
        return "a loop in Python" if self._copy is _in_python else "a native loop"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def copy(self) -> None:
        """Copies every run; all bytes are there when it returns."""
        list(self._threads.map(self._copy, self._pieces))


def _in_python(rows: Rows) -> None:
    for destination, source, nbytes in rows.tolist():
        libc.memmove(destination, source, nbytes)


def _native() -> Callable[[Rows], None] | None:
    if platform.machine() != "x86_64" or struct.calcsize("P") != 8:
        return None
    code = bytes.fromhex("".join(line[:16].strip() for line in _LOOP.splitlines()))
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        page.write(code)
        address = int(np.frombuffer(page, dtype=np.uint8).ctypes.data)
        libc.make_executable(address, mmap.PAGESIZE)
    except OSError:
        return None
    call = libc.row_function(address)

    def copy(rows: Rows, _page: mmap.mmap = page) -> None:  # the page lives as long as the function
        call(rows.ctypes.data, len(rows), libc.MEMMOVE_ADDRESS)

    return copy
