"""CRC-32C of blocks of a rank's memory, by the library of google-crc32c, without holding the interpreter lock.

Its Python function sums up one run of bytes and holds the lock for as long as that takes: 0.1 ms a megabyte for which
everybody else waits. Called directly from Python the C function lets go of the lock, but has to win it back after
every run, which beside other threads takes longer than a run of 16 KB. So a loop of machine code calls it for many
runs; where there is none, Python does.
"""

import ctypes
import functools
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvgrpc.core.chunks import Pieces
from kvgrpc.core.descriptors import Ids, Runs
from kvgrpc.core.endpoints import Segment
from kvgrpc.datapath import machine_code
from kvgrpc.datapath.addresses import check_runs, to_rows
from kvgrpc.datapath.base import DataPathUnavailable
from kvgrpc.datapath.memory import is_host, memory_bytes

Sums = NDArray[np.uint32]
Rows = NDArray[np.int64]
"""Shape [n, 3], contiguous: address, bytes, and the address of the uint32 sum that goes on with them."""
SumRows = Callable[[Rows], None]

SLICE_BYTES = 4 << 20
"""Of blocks that one piece of work sums up: half a millisecond."""
_WHOLE = 1 << 62
"""Rows are not cut."""
_CHECK = b"123456789"
_CHECK_CRC = 0xE3069283
"""What every CRC-32C makes of these nine characters."""

# void sum_rows(const int64_t (*rows)[3], uint64_t count, uint32_t (*extend)(uint32_t, const void *, size_t))
# Calling convention of System V. Each line: bytes, listing.
# A kilobyte a call: given more, the library sums up three streams side by side, and from memory, which the processor
# does not fetch ahead for three, that is 12 GB/s instead of 19.
SUM_ROWS = """
f30f1efa        endbr64
55              push rbp
4889e5          mov rbp, rsp
53              push rbx
4154            push r12
4155            push r13
4156            push r14
4157            push r15
4883ec08        sub rsp, 8              # calls want the stack at a multiple of 16
4889fb          mov rbx, rdi            # row
4989f4          mov r12, rsi            # rows left
4989d5          mov r13, rdx            # extend
4d85e4          test r12, r12
743b            je done
                next:
4c8b3b          mov r15, [rbx]
4c8b7308        mov r14, [rbx + 8]      # bytes left
488b4310        mov rax, [rbx + 16]
8b00            mov eax, [rax]          # the sum so far
                more:
89c7            mov edi, eax
4c89fe          mov rsi, r15
ba00040000      mov edx, 1024
4939d6          cmp r14, rdx
490f42d6        cmovb rdx, r14
4901d7          add r15, rdx
4929d6          sub r14, rdx
41ffd5          call r13
4d85f6          test r14, r14
75e1            jne more
488b5310        mov rdx, [rbx + 16]
8902            mov [rdx], eax
4883c318        add rbx, 24
49ffcc          dec r12
75c5            jne next
                done:
4883c408        add rsp, 8
415f            pop r15
415e            pop r14
415d            pop r13
415c            pop r12
5b              pop rbx
5d              pop rbp
c3              ret
"""


@dataclass(frozen=True, eq=False)
class Plan:
    """What is to be summed up, as addresses."""

    rows: Rows
    values: Sums
    """Shape [sums]: what the rows point to."""
    slices: list[tuple[int, int]]
    """Ranges (first, end) of rows that are worth a thread's turn. No sum has rows in two of them."""


class Summer:
    """Sums up blocks of one memory. Raises DataPathUnavailable when that cannot be done here."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        if not is_host(segments):
            raise DataPathUnavailable("checksums are of host memory only, and this rank's is on a device")
        self._segments = tuple(segments)
        self._sum = summer()

    def plan(self, pieces: Pieces) -> Plan:
        """Raises DataPathFailed for pieces out of range."""
        runs = Runs(pieces.offsets, pieces.offsets, pieces.nbytes)
        check_runs(runs, total := memory_bytes(self._segments), total)
        rows = to_rows(runs, self._segments, self._segments, _WHOLE)
        # A piece that lies in two segments has two rows: which piece a row is of follows from the bytes before it.
        ends = np.cumsum(rows[:, 2])
        piece = np.searchsorted(np.cumsum(pieces.nbytes), ends - rows[:, 2], side="right")
        number = np.searchsorted(np.cumsum(pieces.counts), piece, side="right")
        values: Sums = np.zeros(len(pieces.counts), dtype=np.uint32)
        asked = np.empty((len(rows), 3), dtype=np.int64)
        asked[:, 0], asked[:, 1] = rows[:, 1], rows[:, 2]
        asked[:, 2] = values.ctypes.data + number * values.itemsize
        return Plan(asked, values, _slices(number, ends))

    def sum(self, plan: Plan, first: int, end: int) -> None:
        """The sums of one slice."""
        self._sum(plan.rows[first:end])


def _slices(number: Ids, ends: Ids) -> list[tuple[int, int]]:
    """Of rows that belong to sums by `number`, and end after so many bytes."""
    last = np.flatnonzero(np.diff(number, append=-1))  # of each sum
    if not len(last):
        return []
    full = np.searchsorted(ends[last], np.arange(SLICE_BYTES, int(ends[-1]), SLICE_BYTES))
    bounds = [0, *(last[np.unique(full)] + 1).tolist()]
    if bounds[-1] < len(number):
        bounds.append(len(number))
    return list(itertools.pairwise(bounds))


@functools.cache
def summer() -> SumRows:
    """The function that sums up rows. Raises DataPathUnavailable without google-crc32c."""
    try:
        import google_crc32c  # noqa: F401 - loads the library
    except ImportError as error:
        raise DataPathUnavailable("checksums need google-crc32c: pip install 'kvgrpc[server]'") from error
    library = re.search(r"/\S*/libcrc32c\b\S*", Path("/proc/self/maps").read_text())
    call = machine_code.load(machine_code.parse(SUM_ROWS)[0]) if library else None
    if library and call is not None:
        extend = ctypes.cast(ctypes.CDLL(library[0]).crc32c_extend, ctypes.c_void_p).value
        assert extend is not None

        def sum_rows(rows: Rows) -> None:
            call(rows.ctypes.data, len(rows), extend)

        if sums_up(sum_rows):
            return sum_rows

    return sum_in_loop


def sum_in_loop(rows: Rows) -> None:
    """Row by row, holding the interpreter lock."""
    import google_crc32c

    for address, nbytes, to in rows.tolist():
        so_far = ctypes.c_uint32.from_address(to)
        so_far.value = google_crc32c.extend(so_far.value, ctypes.string_at(address, nbytes))


def sums_up(sum_rows: SumRows) -> bool:
    """Whether it makes of nine characters, whole and in parts, what every CRC-32C does."""
    data = np.frombuffer(_CHECK, dtype=np.uint8)
    found: Sums = np.zeros(2, dtype=np.uint32)
    at, to = data.ctypes.data, found.ctypes.data
    sum_rows(np.array([(at, 9, to), (at, 4, to + 4), (at + 4, 0, to + 4), (at + 4, 5, to + 4)], dtype=np.int64))
    return bool((found == _CHECK_CRC).all())
