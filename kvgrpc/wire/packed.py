"""Many numbers into a message, and out of it, by numpy: from Python lists every number costs six times as much.

What is written is protobuf's wire format of packed fields of integers; tests compare it with what protobuf writes.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvgrpc.core.values.descriptors import FEW_IDS, Ids, runs_of, to_runs
from kvgrpc.v1 import common_pb2

FEW = 1024
"""Up to so many runs the usual way costs less."""


def put_runs(ids: Ids, into: common_pb2.BlockRuns) -> None:
    """Writes maximal runs of consecutive ids, in order, into a message that is empty."""
    if len(ids) <= FEW_IDS:
        starts, counts = to_runs(ids)
        into.starts.extend(starts)
        into.counts.extend(counts)
        return
    first, length = runs_of(ids)
    if len(first) <= FEW:
        into.starts.extend(first.tolist())
        into.counts.extend(length.tolist())
    else:
        into.MergeFromString(packed_field(1, first) + packed_field(2, length))


def packed_checksums(values: Sequence[int]) -> bytes:
    """Checksums as the core has them: uint32, little-endian, one after the other."""
    return np.array(values, dtype="<u4").tobytes()


def unpacked_checksums(values: bytes) -> list[int]:
    """The inverse of `packed_checksums`."""
    found: list[int] = np.frombuffer(values, dtype="<u4").tolist()
    return found


def varints(values: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Numbers as protobuf writes them: seven bits a byte, the lowest first, the top bit set where more follow."""
    size = max(-(-int(values.max(initial=0)).bit_length() // 7), 1)
    if size == 1:
        return values.astype(np.uint8)
    parts = np.empty((size, len(values)), dtype=np.uint8)
    used = np.ones((size, len(values)), dtype=bool)
    for place in range(size):
        rest = values >> np.uint64(7 * place)
        parts[place] = rest & np.uint64(0x7F)
        if place:
            used[place] = rest != 0
            parts[place - 1] |= used[place].view(np.uint8) << np.uint8(7)
    written: NDArray[np.uint8] = parts.T[used.T]
    return written


def packed_field(number: int, values: Ids) -> bytes:
    """One packed field of a message, of numbers that are not negative: its tag, its length, and the values."""
    data = varints(values.astype(np.uint64)).tobytes()
    return bytes([number << 3 | 2]) + varints(np.array([len(data)], dtype=np.uint64)).tobytes() + data
