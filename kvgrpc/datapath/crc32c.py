"""CRC-32C of blocks of a rank's memory, with google-crc32c's library: a thread's work that holds no lock.

Its Python function would hold the interpreter lock for as long as a block takes, 0.1 ms a megabyte, and everybody else
would wait. The C library beneath it is called directly where it is found.
"""

import ctypes
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from kvgrpc.core.chunks import Pieces
from kvgrpc.core.descriptors import Runs
from kvgrpc.core.endpoints import Segment
from kvgrpc.datapath.addresses import check_runs, to_rows
from kvgrpc.datapath.base import DataPathUnavailable
from kvgrpc.datapath.memory import is_host, memory_bytes

Extend = Callable[[int, int, int], int]
"""The CRC of what came before, an address and a length to the CRC of both."""
SLICE_BYTES = 4 << 20
"""Of blocks that one piece of work sums up: half a millisecond."""


class Summer:
    """Sums up blocks of one memory. Raises DataPathUnavailable when that cannot be done here."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        if not is_host(segments):
            raise DataPathUnavailable("checksums are of host memory only, and this rank's is on a device")
        self._segments = tuple(segments)
        self._extend = _library()

    def slices(self, pieces: Pieces) -> list[tuple[int, int]]:
        """Ranges (first, end) of sums that are worth a thread's turn. Raises DataPathFailed for pieces out of range."""
        check_runs(Runs(pieces.offsets, pieces.offsets, pieces.nbytes), total := memory_bytes(self._segments), total)
        if not len(pieces.counts):
            return []
        ends = np.cumsum(pieces.counts)
        done = np.concatenate(([0], np.cumsum(pieces.nbytes)))[ends]
        edges = np.searchsorted(done, np.arange(SLICE_BYTES, int(done[-1]), SLICE_BYTES)) + 1
        bounds = [0, *sorted({int(edge) for edge in edges if edge < len(ends)}), len(ends)]
        return list(itertools.pairwise(bounds))

    def sums(self, pieces: Pieces, first: int, end: int) -> list[int]:
        """The sums from `first` to `end`."""
        edges = np.concatenate(([0], np.cumsum(pieces.counts)))
        found = []
        for begin, stop in zip(edges[first:end].tolist(), edges[first + 1 : end + 1].tolist(), strict=True):
            crc = 0
            for address, nbytes in self._spans(pieces, begin, stop):
                crc = self._extend(crc, address, nbytes)
            found.append(crc)
        return found

    def _spans(self, pieces: Pieces, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Addresses and lengths; a piece that lies in two segments has two."""
        offsets = pieces.offsets[begin:end]
        runs = Runs(offsets, offsets, pieces.nbytes[begin:end])
        for _, address, nbytes in to_rows(runs, self._segments, self._segments, 1 << 40).tolist():
            yield address, nbytes


def _library() -> Extend:
    try:
        import google_crc32c
    except ImportError as error:
        raise DataPathUnavailable("checksums need google-crc32c: pip install 'kvgrpc[server]'") from error
    found = re.search(r"/\S*/libcrc32c\b\S*", Path("/proc/self/maps").read_text())
    if found is None:
        return lambda crc, address, nbytes: google_crc32c.extend(crc, ctypes.string_at(address, nbytes))
    function = ctypes.CDLL(found[0]).crc32c_extend
    function.argtypes = [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = ctypes.c_uint32
    extend: Extend = function
    return extend
