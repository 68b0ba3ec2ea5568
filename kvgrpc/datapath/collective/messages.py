"""Cuts the bytes of one send into messages. Both ranks get the same ones, from the lengths of the runs alone.

A long run is sent from its place to its destination. Short runs travel together, packed by the source and unpacked by
the destination: a message of its own takes longer than the copies of so few bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvgrpc.core.values.block_ids import Ids
from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import Segment
from kvgrpc.datapath.copy.copy_methods import best, copier
from kvgrpc.datapath.host.addresses import Rows, cut, to_rows

FRAMING = 3
"""Version of how sends are cut, which connection each message takes, and how halves describe themselves. Every change
needs another number: Gloo ends the receiving process if a message is longer than what it receives.
"""
MESSAGE_BYTES_MAX = 4 << 20
ALONE_BYTES_MIN = 1 << 20
"""Minimum length of a run that is a message by itself, or several."""
PACKED_BYTES_MAX = MESSAGE_BYTES_MAX


@dataclass(frozen=True, eq=False)
class Message:
    """Bytes that are sent at once, with their places in the memory of one rank."""

    nbytes: int
    rows: Rows
    """Copies between this rank's memory and a buffer whose first address is 0: shape [n, 3], as `Rows`."""
    address: int
    """Address of the bytes if they are contiguous, else 0."""


def messages(
    runs: Runs, own: Sequence[Segment], *, sends: bool, most_bytes: int = MESSAGE_BYTES_MAX
) -> Iterator[Message]:
    """Yields the messages of checked runs, in order, each of `most_bytes` at most. `own` is the memory of the calling
    rank, whose offsets are `runs.src` if it sends, else `runs.dst`.
    """
    offsets = runs.src if sends else runs.dst
    whole = cut(Runs(offsets, offsets, runs.nbytes), most_bytes)
    for first, end in _split(whole.nbytes, most_bytes):
        part = Runs(whole.src[first:end], whole.dst[first:end], whole.nbytes[first:end])
        yield _message(part, own, sends)


def _split(nbytes: Ids, most_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields the ranges of runs that travel together."""
    alone = nbytes >= min(ALONE_BYTES_MIN, most_bytes)
    ends = np.cumsum(nbytes)
    first = 0
    while first < len(nbytes):
        if alone[first]:
            end = first + 1
        else:
            before = int(ends[first] - nbytes[first])
            end = int(np.searchsorted(ends, before + most_bytes, side="right"))
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


def copy_rows(rows: Rows, *, source: int = 0, destination: int = 0) -> None:
    """Copies rows. One side's addresses are offsets in a buffer, which begins at `source` or `destination`."""
    copy = copier(best(float(rows[:, 2].mean())))
    assert copy is not None, "it is among those that work"
    copy(np.ascontiguousarray(rows + np.array([destination, source, 0])))
