"""CRC-32C of blocks of a rank's memory, by the library of google-crc32c, without holding the interpreter lock.

Its Python function sums up one run of bytes and holds the lock for as long as that takes: 0.1 ms a megabyte for which
all other threads wait. Called directly from Python the C function lets go of the lock, but has to win it back after
every run, which beside other threads takes longer than a run of 16 KB. So `kvgrpc_checksum_rows` of `rows.c` calls it
for many runs; where that was not built, Python does.

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

from kvgrpc.core.values.descriptors import Ids, Runs
from kvgrpc.core.values.endpoints import Segment
from kvgrpc.core.values.pieces import Pieces
from kvgrpc.datapath.base import DataPathUnavailable
from kvgrpc.datapath.copy.rows import row_function
from kvgrpc.datapath.host import libc
from kvgrpc.datapath.host.addresses import check_runs, to_rows
from kvgrpc.datapath.host.memory import is_host, memory_bytes

Values = NDArray[np.uint32]
Rows = NDArray[np.int64]
"""Shape [n, 4], contiguous: address, from where it is copied there before (0: nothing is), bytes, and the address of
the uint32 sum that goes on with them.
"""
ChecksumRows = Callable[[Rows], None]

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


@dataclass(frozen=True, eq=False)
class Plan:
    """What is to be summed up, as addresses."""

    checksum_rows: ChecksumRows
    rows: Rows
    values: Values
    """What the rows point to."""
    slices: list[tuple[int, int]]
    """Ranges (first, end) of rows that are worth a thread's turn. No sum has rows in two of them."""

    def sum(self, first: int, end: int) -> None:
        """The sums of one slice."""
        self.checksum_rows(self.rows[first:end])

    def compute_numbers(self, first: int, end: int) -> None:
        """The sums with these numbers."""
        begin, each = self.values.ctypes.data, self.values.itemsize
        rows = np.searchsorted(self.rows[:, 3], [begin + first * each, begin + end * each])
        self.sum(int(rows[0]), int(rows[1]))


class Checksummer:
    """Values up blocks of one memory. Raises DataPathUnavailable when that cannot be done here."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        if not is_host(segments):
            raise DataPathUnavailable("checksums are of host memory only, and this rank's is on a device")
        self._segments = tuple(segments)
        self._sum = checksummer()

    def check(self, pieces: Pieces) -> None:
        """Raises DataPathFailed for pieces out of range."""
        check_runs(Runs(pieces.offsets, pieces.offsets, pieces.nbytes), total := memory_bytes(self._segments), total)

    def plan(
        self, pieces: Pieces, into: Values, sources: Ids | None = None, copied_from: Sequence[Segment] = ()
    ) -> Plan:
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
def checksummer() -> ChecksumRows:
    """The function that sums up rows. Raises DataPathUnavailable without google-crc32c."""
    try:
        import google_crc32c  # noqa: F401 - loads the library
    except ImportError as error:
        raise DataPathUnavailable("checksums need google-crc32c: pip install 'kvgrpc[server]'") from error
    library = re.search(r"/\S*/libcrc32c\b\S*", Path("/proc/self/maps").read_text())
    extend = library and ctypes.cast(ctypes.CDLL(library[0]).crc32c_extend, ctypes.c_void_p).value
    checksum_rows = row_function("kvgrpc_checksum_rows", extend) if extend else None
    return checksum_rows if checksum_rows is not None and computes_crc32c(checksum_rows) else checksum_in_loop


def checksum_in_loop(rows: Rows) -> None:
    """Row by row, holding the interpreter lock."""
    import google_crc32c

    for address, source, nbytes, to in rows.tolist():
        if source:
            libc.memmove(address, source, nbytes)
        so_far = ctypes.c_uint32.from_address(to)
        so_far.value = google_crc32c.extend(so_far.value, ctypes.string_at(address, nbytes))


def computes_crc32c(checksum_rows: ChecksumRows) -> bool:
    """Whether it makes of nine characters, whole and in parts, what every CRC-32C does, and copies what it sums up."""
    data = np.frombuffer(_CHECK * _TIMES, dtype=np.uint8)
    copy = np.zeros(len(data) + _ALIGNED, dtype=np.uint8)
    copy = copy[-copy.ctypes.data % _ALIGNED :][: len(data)]
    found: Values = np.zeros(4, dtype=np.uint32)
    at, end, to = data.ctypes.data, copy.ctypes.data, found.ctypes.data
    rows = [(at, 0, 9, to), (at, 0, 4, to + 4), (at + 4, 0, 0, to + 4), (at + 4, 0, 5, to + 4)]
    rows += [(at, 0, len(data), to + 8), (end, at, len(data), to + 12)]
    checksum_rows(np.array(rows, dtype=np.int64))
    return bool((found[:2] == _CHECK_CRC).all() and found[2] == found[3] and (copy == data).all())
