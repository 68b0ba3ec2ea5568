"""CRC-32C of blocks of a rank's memory, by the library of google-crc32c, without the interpreter lock.

The library's Python function checksums one run of bytes and holds the lock meanwhile: 0.1 ms a megabyte for which all
other threads wait. Called directly from Python, the C function releases the lock but has to win it back after every
run. Beside other threads that takes longer than a run of 16 KB. So `kvgrpc_checksum_rows` of `rows.c` calls it for many
runs; if that was not built, Python does.

The same loop can copy what it checksums. Each byte is read once, so that the checksum is of the bytes that are written,
even if the source changes meanwhile.
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

from kvgrpc.core.values.block_ids import Ids
from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import Segment
from kvgrpc.core.values.pieces import Pieces
from kvgrpc.datapath.base import DataPathUnavailable
from kvgrpc.datapath.copy.rows import row_function
from kvgrpc.datapath.host import libc
from kvgrpc.datapath.host.addresses import check_runs, to_rows
from kvgrpc.datapath.host.memory import is_host, memory_bytes

Values = NDArray[np.uint32]
Rows = NDArray[np.int64]
"""Rows of shape [n, 4], contiguous: address, address from which it is first copied (0: no copy), bytes, and the address
of the uint32 checksum that they continue.
"""
ChecksumRows = Callable[[Rows], None]

SLICE_BYTES = 4 << 20
"""Bytes of blocks per piece of work: half a millisecond."""
_WHOLE = 1 << 62
"""Row length that cuts no rows."""
_CHECK = b"123456789"
_CHECK_CRC = 0xE3069283
"""CRC-32C of `_CHECK`."""
_TIMES = 300
"""Number of copies of `_CHECK` in the trial: two kilobytes past the cache, and the rest."""
_ALIGNED = 64


@dataclass(frozen=True, eq=False)
class ChecksumPlan:
    """Checksums to compute, as addresses."""

    checksum_rows: ChecksumRows
    rows: Rows
    values: Values
    """Results, to which the rows point."""
    slices: list[tuple[int, int]]
    """Ranges (first, end) of rows that are worth a thread's turn. No checksum has rows in two of them."""

    def sum(self, first: int, end: int) -> None:
        """Computes the checksums of one slice of rows."""
        self.checksum_rows(self.rows[first:end])

    def compute_numbers(self, first: int, end: int) -> None:
        """Computes checksums [first, end)."""
        begin, each = self.values.ctypes.data, self.values.itemsize
        rows = np.searchsorted(self.rows[:, 3], [begin + first * each, begin + end * each])
        self.sum(int(rows[0]), int(rows[1]))


class Checksummer:
    """Checksums blocks of one memory. Raises DataPathUnavailable if that cannot be done here."""

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
    ) -> ChecksumPlan:
        """Plans checksums that are written to `into`, which is zeros. With `sources`, an offset of `copied_from` for
        each piece, the bytes are first copied from there.

        Raises DataPathFailed for pieces out of range.
        """
        source = copied_from if sources is not None else self._segments
        runs = Runs(pieces.offsets if sources is None else sources, pieces.offsets, pieces.nbytes)
        check_runs(runs, memory_bytes(source), memory_bytes(self._segments))
        rows = to_rows(runs, source, self._segments, _WHOLE)
        # A piece in two segments has two rows. The bytes before a row tell which piece it belongs to.
        ends = np.cumsum(rows[:, 2])
        piece = np.searchsorted(np.cumsum(pieces.nbytes), ends - rows[:, 2], side="right")
        number = np.searchsorted(np.cumsum(pieces.counts), piece, side="right")
        asked = np.empty((len(rows), 4), dtype=np.int64)
        asked[:, :3] = rows
        if sources is None:
            asked[:, 1] = 0
        asked[:, 3] = into.ctypes.data + number * into.itemsize
        return ChecksumPlan(self._sum, asked, into, _slices(number, ends))


def _slices(number: Ids, ends: Ids) -> list[tuple[int, int]]:
    """Returns the slices of rows with these checksum numbers, which end after `ends` bytes."""
    last = np.flatnonzero(np.diff(number, append=-1))  # of each checksum
    if not len(last):
        return []
    full = np.searchsorted(ends[last], np.arange(SLICE_BYTES, int(ends[-1]), SLICE_BYTES))
    bounds = [0, *(last[np.unique(full)] + 1).tolist()]
    if bounds[-1] < len(number):
        bounds.append(len(number))
    return list(itertools.pairwise(bounds))


@functools.cache
def checksummer() -> ChecksumRows:
    """Returns the function that checksums rows. Raises DataPathUnavailable without google-crc32c."""
    try:
        import google_crc32c  # noqa: F401 - loads the library
    except ImportError as error:
        raise DataPathUnavailable("checksums need google-crc32c: install kvgrpc's extra 'server'") from error
    library = re.search(r"/\S*/libcrc32c\b\S*", Path("/proc/self/maps").read_text())
    extend = library and ctypes.cast(ctypes.CDLL(library[0]).crc32c_extend, ctypes.c_void_p).value
    checksum_rows = row_function("kvgrpc_checksum_rows", extend) if extend else None
    return checksum_rows if checksum_rows is not None and computes_crc32c(checksum_rows) else checksum_in_loop


def checksum_in_loop(rows: Rows) -> None:
    """Checksums row by row, and holds the interpreter lock."""
    import google_crc32c

    for address, source, nbytes, to in rows.tolist():
        if source:
            libc.memmove(address, source, nbytes)
        so_far = ctypes.c_uint32.from_address(to)
        so_far.value = google_crc32c.extend(so_far.value, ctypes.string_at(address, nbytes))


def computes_crc32c(checksum_rows: ChecksumRows) -> bool:
    """Returns True if it computes CRC-32C of nine characters, whole and in parts, and copies what it checksums."""
    data = np.frombuffer(_CHECK * _TIMES, dtype=np.uint8)
    copy = np.zeros(len(data) + _ALIGNED, dtype=np.uint8)
    copy = copy[-copy.ctypes.data % _ALIGNED :][: len(data)]
    found: Values = np.zeros(4, dtype=np.uint32)
    at, end, to = data.ctypes.data, copy.ctypes.data, found.ctypes.data
    rows = [(at, 0, 9, to), (at, 0, 4, to + 4), (at + 4, 0, 0, to + 4), (at + 4, 0, 5, to + 4)]
    rows += [(at, 0, len(data), to + 8), (end, at, len(data), to + 12)]
    checksum_rows(np.array(rows, dtype=np.int64))
    return bool((found[:2] == _CHECK_CRC).all() and found[2] == found[3] and (copy == data).all())
