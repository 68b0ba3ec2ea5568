"""Conversion of many numbers into and out of a message by numpy. From Python lists, a number costs six times as much.

The bytes that are merged into a message are protobuf's wire format of packed integer fields. Tests compare the message
with the one that protobuf makes of lists.
"""

from collections.abc import Sequence

import numpy as np
from google.protobuf.message import Message

from kvgrpc.core.values.block_ids import FEW_IDS, Ids, runs_of, to_runs
from kvgrpc.v1 import common_pb2

FEW = 1024
"""Number of runs up to which protobuf's own way costs less."""


def ids(values: Sequence[int]) -> Ids:
    """Returns a repeated field of integers as an array."""
    return np.asarray(values, dtype=np.int64)


def put_columns(into: Message, **columns: Ids) -> None:
    """Writes repeated fields of equal length, by their names, into a message in which they are empty."""
    if len(next(iter(columns.values()))) <= FEW:
        for name, values in columns.items():
            getattr(into, name).extend(values.tolist())
        return
    fields = into.DESCRIPTOR.fields_by_name
    into.MergeFromString(b"".join(packed_field(fields[name].number, values) for name, values in columns.items()))


def put_runs(ids: Ids, into: common_pb2.BlockRuns) -> None:
    """Writes maximal runs of consecutive ids, in order, into an empty message."""
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
    """Returns checksums in the core's form: consecutive uint32, little-endian."""
    return np.array(values, dtype="<u4").tobytes()


def unpacked_checksums(values: bytes) -> list[int]:
    """Returns the numbers of `packed_checksums`; its inverse."""
    found: list[int] = np.frombuffer(values, dtype="<u4").tolist()
    return found


def packed_field(number: int, values: Ids) -> bytes:
    """Returns one packed field of a message, for numbers in [0, 2**56): its tag, its length, and the values.

    A message into which it is merged writes each number in as few bytes as possible. Here all take the same 1, 2, 4 or
    8 bytes, which are words for numpy: seven bits a byte, the lowest first, the top bit set if more follow.
    """
    bits = int(values.max(initial=0)).bit_length()
    width = next(width for width in (1, 2, 4, 8) if bits <= 7 * width)
    numbers = values.astype(f"<u{width}")
    words = numbers & 0x7F
    for place in range(1, width):
        words |= (numbers & (0x7F << 7 * place)) << place
        words |= 0x80 << 8 * (place - 1)
    return bytes([number << 3 | 2]) + _varint(words.nbytes) + words.tobytes()


def _varint(value: int) -> bytes:
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*written, value])
