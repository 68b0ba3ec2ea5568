"""CRC-32C of blocks of a rank's memory, by the library of google-crc32c, without holding the interpreter lock.

Its Python function sums up one run of bytes and holds the lock for as long as that takes: 0.1 ms a megabyte for which
everybody else waits. Called directly from Python the C function lets go of the lock, but has to win it back after
every run, which beside other threads takes longer than a run of 16 KB. So a loop of machine code calls it for many
runs; where there is none, Python does.

The same loop copies what it sums up, where asked to: each byte is read once, so that what is summed up is what is
written, though the source may write there meanwhile.
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

from kvgrpc.core.values.chunks import Pieces
from kvgrpc.core.values.descriptors import Ids, Runs
from kvgrpc.core.values.endpoints import Segment
from kvgrpc.datapath.base import DataPathUnavailable
from kvgrpc.datapath.copy import machine_code
from kvgrpc.datapath.host import libc
from kvgrpc.datapath.host.addresses import check_runs, to_rows
from kvgrpc.datapath.host.memory import is_host, memory_bytes

Sums = NDArray[np.uint32]
Rows = NDArray[np.int64]
"""Shape [n, 4], contiguous: address, from where it is copied there before (0: nothing is), bytes, and the address of
the uint32 sum that goes on with them.
"""
SumRows = Callable[[Rows], None]

SLICE_BYTES = 4 << 20
"""Of blocks that one piece of work sums up: half a millisecond."""
_WHOLE = 1 << 62
"""Rows are not cut."""
_CHECK = b"123456789"
_CHECK_CRC = 0xE3069283
"""What every CRC-32C makes of these nine characters."""
_TIMES = 300
"""That many of them are copied: two kilobytes past the cache, and the rest."""
_ALIGNED = 64

# void sum_rows(const int64_t (*rows)[4], uint64_t count, uint32_t (*extend)(uint32_t, const void *, size_t))
# Calling convention of System V. Each line: bytes, listing.
# A kilobyte a call: the library sums up three streams side by side, which in more than that lie too far from each other
# for what the processor fetches ahead by itself. Blocks end too often for that anyway: everything that is read is
# fetched here, two kilobytes ahead, beyond the end of a row too. What is copied goes by way of a kilobyte on the stack
# and past the cache to where it goes. Summed up where it goes, it would have to be fetched there first, and where
# source and destination lie 256 MB from each other AMD's way prediction mixes them up (50 ms for 256 MB instead of 32).
SUM_ROWS = """
f30f1efa        endbr64
55              push rbp
4889e5          mov rbp, rsp
53              push rbx
4154            push r12
4155            push r13
4156            push r14
4157            push r15
4881ec18040000  sub rsp, 1048           # a kilobyte at rsp, and what is kept below rbp - 40
4883e4c0        and rsp, -64
4889fb          mov rbx, rdi            # row
48c1e605        shl rsi, 5
4c8d2437        lea r12, [rdi + rsi]    # the end of the rows
4989d5          mov r13, rdx            # extend
48897dd0        mov [rbp - 48], rdi     # row that is fetched next, ...
31c9            xor ecx, ecx
48894dc8        mov [rbp - 56], rcx     # ... from here on
41be02000000    mov r14d, 2
                early:
e8cb000000      call fetch
41ffce          dec r14d
75f6            jnz early
                next:
4c39e3          cmp rbx, r12
0f83ab000000    jae done
4c8b3b          mov r15, [rbx]
4c8b7310        mov r14, [rbx + 16]     # bytes left
488b4318        mov rax, [rbx + 24]
8b00            mov eax, [rax]
8945c0          mov [rbp - 64], eax     # the sum so far
                more:
e8a8000000      call fetch
ba00040000      mov edx, 1024
4939d6          cmp r14, rdx
490f42d6        cmovb rdx, r14
488b7308        mov rsi, [rbx + 8]
4885f6          test rsi, rsi
7457            jz there                # nothing is copied
482b33          sub rsi, [rbx]
4c01fe          add rsi, r15
4889e7          mov rdi, rsp
89d1            mov ecx, edx
f3a4            rep movsb
4889e6          mov rsi, rsp
4c89ff          mov rdi, r15
89d1            mov ecx, edx
41f6c70f        test r15b, 15           # to where a streaming store may begin, ...
7535            jne odd
81fa00040000    cmp edx, 1024           # ... and a whole kilobyte
752d            jne odd
                stream:
0f2806          movaps xmm0, [rsi]
0f284e10        movaps xmm1, [rsi + 16]
0f285620        movaps xmm2, [rsi + 32]
0f285e30        movaps xmm3, [rsi + 48]
0f2b07          movntps [rdi], xmm0     # does not load the line it overwrites
0f2b4f10        movntps [rdi + 16], xmm1
0f2b5720        movntps [rdi + 32], xmm2
0f2b5f30        movntps [rdi + 48], xmm3
4883c640        add rsi, 64
4883c740        add rdi, 64
83e940          sub ecx, 64
75d5            jnz stream
eb02            jmp copied
                odd:
f3a4            rep movsb
                copied:
4889e6          mov rsi, rsp            # summed up is what was read, once
eb03            jmp sum
                there:
4c89fe          mov rsi, r15
                sum:
4901d7          add r15, rdx
4929d6          sub r14, rdx
8b7dc0          mov edi, [rbp - 64]
41ffd5          call r13
8945c0          mov [rbp - 64], eax
4d85f6          test r14, r14
0f8574ffffff    jnz more
488b5318        mov rdx, [rbx + 24]
8902            mov [rdx], eax          # once a row: other threads' sums lie in the same line of the cache
4883c320        add rbx, 32
e94cffffff      jmp next
                done:
0faef8          sfence                  # before anyone is told that the bytes are there
488d65d8        lea rsp, [rbp - 40]
415f            pop r15
415e            pop r14
415d            pop r13
415c            pop r12
5b              pop rbx
5d              pop rbp
c3              ret
                fetch:
488b75d0        mov rsi, [rbp - 48]
4c39e6          cmp rsi, r12
734d            jae fetched
488b4dc8        mov rcx, [rbp - 56]
488b3e          mov rdi, [rsi]          # what will be summed up there, ...
488b5608        mov rdx, [rsi + 8]
4885d2          test rdx, rdx
480f45fa        cmovnz rdi, rdx         # ... or copied from here
4801cf          add rdi, rcx
488b4610        mov rax, [rsi + 16]
4829c8          sub rax, rcx            # bytes left
4881c100040000  add rcx, 1024
483d00040000    cmp rax, 1024
7708            ja within
4883c620        add rsi, 32             # then the next row
31c9            xor ecx, ecx
eb05            jmp step
                within:
b800040000      mov eax, 1024
                step:
488975d0        mov [rbp - 48], rsi
48894dc8        mov [rbp - 56], rcx
                line:
0f180f          prefetcht0 [rdi]
4883c740        add rdi, 64
4883e840        sub rax, 64
77f3            ja line
                fetched:
c3              ret
"""


@dataclass(frozen=True, eq=False)
class Plan:
    """What is to be summed up, as addresses."""

    sum_rows: SumRows
    rows: Rows
    values: Sums
    """What the rows point to."""
    slices: list[tuple[int, int]]
    """Ranges (first, end) of rows that are worth a thread's turn. No sum has rows in two of them."""

    def sum(self, first: int, end: int) -> None:
        """The sums of one slice."""
        self.sum_rows(self.rows[first:end])

    def sum_numbers(self, first: int, end: int) -> None:
        """The sums with these numbers."""
        begin, each = self.values.ctypes.data, self.values.itemsize
        rows = np.searchsorted(self.rows[:, 3], [begin + first * each, begin + end * each])
        self.sum(int(rows[0]), int(rows[1]))


class Summer:
    """Sums up blocks of one memory. Raises DataPathUnavailable when that cannot be done here."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        if not is_host(segments):
            raise DataPathUnavailable("checksums are of host memory only, and this rank's is on a device")
        self._segments = tuple(segments)
        self._sum = summer()

    def check(self, pieces: Pieces) -> None:
        """Raises DataPathFailed for pieces out of range."""
        check_runs(Runs(pieces.offsets, pieces.offsets, pieces.nbytes), total := memory_bytes(self._segments), total)

    def plan(self, pieces: Pieces, into: Sums, sources: Ids | None = None, copied_from: Sequence[Segment] = ()) -> Plan:
        """The sums are written to `into`, which is zeros. With `sources`, one for each piece: they are copied from
        these offsets of `copied_from` before.

        Raises DataPathFailed for pieces out of range.
        """
        source = copied_from if sources is not None else self._segments
        runs = Runs(pieces.offsets if sources is None else sources, pieces.offsets, pieces.nbytes)
        check_runs(runs, memory_bytes(source), memory_bytes(self._segments))
        rows = to_rows(runs, source, self._segments, _WHOLE)
        # A piece that lies in two segments has two rows: which piece a row is of follows from the bytes before it.
        ends = np.cumsum(rows[:, 2])
        piece = np.searchsorted(np.cumsum(pieces.nbytes), ends - rows[:, 2], side="right")
        number = np.searchsorted(np.cumsum(pieces.counts), piece, side="right")
        asked = np.empty((len(rows), 4), dtype=np.int64)
        asked[:, :3] = rows
        if sources is None:
            asked[:, 1] = 0
        asked[:, 3] = into.ctypes.data + number * into.itemsize
        return Plan(self._sum, asked, into, _slices(number, ends))


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

    for address, source, nbytes, to in rows.tolist():
        if source:
            libc.memmove(address, source, nbytes)
        so_far = ctypes.c_uint32.from_address(to)
        so_far.value = google_crc32c.extend(so_far.value, ctypes.string_at(address, nbytes))


def sums_up(sum_rows: SumRows) -> bool:
    """Whether it makes of nine characters, whole and in parts, what every CRC-32C does, and copies what it sums up."""
    data = np.frombuffer(_CHECK * _TIMES, dtype=np.uint8)
    copy = np.zeros(len(data) + _ALIGNED, dtype=np.uint8)
    copy = copy[-copy.ctypes.data % _ALIGNED :][: len(data)]
    found: Sums = np.zeros(4, dtype=np.uint32)
    at, end, to = data.ctypes.data, copy.ctypes.data, found.ctypes.data
    rows = [(at, 0, 9, to), (at, 0, 4, to + 4), (at + 4, 0, 0, to + 4), (at + 4, 0, 5, to + 4)]
    rows += [(at, 0, len(data), to + 8), (end, at, len(data), to + 12)]
    sum_rows(np.array(rows, dtype=np.int64))
    return bool((found[:2] == _CHECK_CRC).all() and found[2] == found[3] and (copy == data).all())
