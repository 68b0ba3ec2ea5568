"""How the bytes of one send are cut into messages: both ranks come to the same, by the lengths of the runs alone.

A long run is sent from where it lies to where it goes. Short ones travel together, packed by the source and unpacked by
the destination: a message of its own takes longer than the copies of so few bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvgrpc.core.values.descriptors import Ids, Runs
from kvgrpc.core.values.endpoints import Segment
from kvgrpc.datapath.host.addresses import Rows, cut, to_rows

FRAMING = 3
"""Names how sends are cut, which connection each message takes, and how halves tell of each other: every change has
another number. To Gloo a message that is longer than what is received is the end of the receiving process.
"""
MESSAGE_BYTES_MAX = 4 << 20
ALONE_BYTES_MIN = 1 << 20
"""A run from this length on is a message, unless it is cut into several."""
PACKED_BYTES_MAX = MESSAGE_BYTES_MAX


@dataclass(frozen=True, eq=False)
class Message:
    """Bytes that are sent at once. Of one rank: where they are there."""

    nbytes: int
    rows: Rows
    """Of this rank's memory to or from a buffer whose first address is 0: shape [n, 3], as `Rows`."""
    address: int
    """Where they lie in one piece; 0: they do not."""


def messages(runs: Runs, own: Sequence[Segment], *, sends: bool) -> Iterator[Message]:
    """The messages of checked runs, in their order. `own`: memory of the rank that asks, whose offsets are `runs.src`
    where it sends, else `runs.dst`.
    """
    offsets = runs.src if sends else runs.dst
    whole = cut(Runs(offsets, offsets, runs.nbytes), MESSAGE_BYTES_MAX)
    for first, end in _split(whole.nbytes):
        part = Runs(whole.src[first:end], whole.dst[first:end], whole.nbytes[first:end])
        yield _message(part, own, sends)


def _split(nbytes: Ids) -> Iterator[tuple[int, int]]:
    """Which runs travel together."""
    alone = nbytes >= ALONE_BYTES_MIN
    ends = np.cumsum(nbytes)
    first = 0
    while first < len(nbytes):
        if alone[first]:
            end = first + 1
        else:
            before = int(ends[first] - nbytes[first])
            end = int(np.searchsorted(ends, before + PACKED_BYTES_MAX, side="right"))
            following = np.flatnonzero(alone[first:end])
            end = max(first + int(following[0]) if len(following) else end, first + 1)
        yield first, end
        first = end


def _message(runs: Runs, own: Sequence[Segment], sends: bool) -> Message:
    total = runs.total_bytes
    ends = np.cumsum(runs.nbytes)
    packed = ends - runs.nbytes
    buffer = (Segment(0, total),)
    if sends:
        rows = to_rows(Runs(runs.src, packed, runs.nbytes), own, buffer, MESSAGE_BYTES_MAX)
    else:
        rows = to_rows(Runs(packed, runs.dst, runs.nbytes), buffer, own, MESSAGE_BYTES_MAX)
    address = int(rows[0, 1 if sends else 0])
    return Message(total, rows, address if len(rows) == 1 else 0)
