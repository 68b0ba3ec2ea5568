"""Loops in machine code, for what Python would have to call row by row: the interpreter lock is let go of once.

A listing stands beside its bytes, and a test assembles it. The code is written to a page of its own that is then
executable and no longer writable. Where the system refuses that (SELinux, systemd's MemoryDenyWriteExecute), or the
processor is another one, there is none, and whoever wanted it does without.
"""

import mmap
import platform
import struct
import sys
from collections.abc import Callable

import numpy as np

from kvgrpc.datapath.host import libc


def parse(listing: str) -> tuple[bytes, str]:
    """The bytes of a listing, and what an assembler makes them from. Each line: bytes, 16 columns wide, and text."""
    lines = [(line[:16].strip(), line[16:].partition("#")[0]) for line in listing.splitlines()]
    return bytes.fromhex("".join(code for code, _ in lines)), "\n".join(text for _, text in lines)


def load(code: bytes) -> Callable[[int, int, int], None] | None:
    """Void f(rows, count, function) of System V's x86-64; None where this machine has no such thing."""
    usable = platform.machine() == "x86_64" and struct.calcsize("P") == 8
    if sys.platform != "linux" or not usable:
        return None
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        page.write(code)
        address = int(np.frombuffer(page, dtype=np.uint8).ctypes.data)
        libc.make_executable(address, mmap.PAGESIZE)
    except OSError:
        return None
    call = libc.row_function(address)

    def function(rows: int, count: int, callee: int, _page: mmap.mmap = page) -> None:
        call(rows, count, callee)  # the page lives as long as this function

    return function
