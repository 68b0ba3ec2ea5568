"""Both ranks cut the bytes of a send into the same messages, and every byte is sent once."""

import itertools

import numpy as np
from hypothesis import given, strategies as st

from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import Segment
from kvgrpc.datapath.collective.messages import ALONE_BYTES_MIN, MESSAGE_BYTES_MAX, PACKED_BYTES_MAX, Message, messages

LENGTHS = st.lists(
    st.one_of(st.integers(1, 4_000), st.integers(200_000, 300_000), st.integers(1, 3 * MESSAGE_BYTES_MAX)),
    min_size=1,
    max_size=12,
)


def laid_out(lengths: list[int], seed: int) -> Runs:
    """Makes runs of these lengths, in one order at the source and in another one at the destination."""
    nbytes = np.array(lengths, dtype=np.int64)
    offsets = []
    for side in range(2):
        order = np.random.default_rng([seed, side]).permutation(len(nbytes))
        offset = np.empty(len(nbytes), dtype=np.int64)
        offset[order] = np.cumsum(nbytes[order]) - nbytes[order]
        offsets.append(offset)
    return Runs(offsets[0], offsets[1], nbytes)


def memory(total: int, parts: int) -> tuple[Segment, ...]:
    """Makes allocations that lie apart from each other, with `total` bytes in all."""
    edges = np.linspace(0, total, min(parts, total) + 1).astype(int)
    return tuple(
        Segment((1 << 40) + i * (1 << 30), int(end - begin)) for i, (begin, end) in enumerate(itertools.pairwise(edges))
    )


def places(found: list[Message], column: int) -> list[tuple[int, int]]:
    """Returns where the bytes of all messages are, in the order of sending, as (address, bytes)."""
    return [(int(row[column]), int(row[2])) for message in found for row in message.rows]


@given(LENGTHS, st.integers(0, 5), st.integers(1, 4), st.integers(1, 4))
def test_both_ranks_cut_alike_and_every_byte_travels_once_in_order(
    lengths: list[int], seed: int, here: int, there: int
) -> None:
    runs = laid_out(lengths, seed)
    own, peer = memory(runs.total_bytes, here), memory(runs.total_bytes, there)
    sent, received = list(messages(runs, own, sends=True)), list(messages(runs, peer, sends=False))
    assert [message.nbytes for message in sent] == [message.nbytes for message in received]
    assert sum(message.nbytes for message in sent) == runs.total_bytes
    for found, segments, offsets, column in ((sent, own, runs.src, 1), (received, peer, runs.dst, 0)):
        bases, begin = [], 0
        for segment in segments:
            bases.append((begin, segment))
            begin += segment.nbytes
        # Addresses are mapped back to the offset of every byte.
        travelled = []
        for address, nbytes in places(found, column):
            first, segment = next((b, s) for b, s in bases if s.address <= address < s.address + s.nbytes)
            assert address + nbytes <= segment.address + segment.nbytes
            travelled.append((first + address - segment.address, nbytes))
        expected = list(zip(offsets.tolist(), lengths, strict=True))
        assert joined(travelled) == joined(expected)


def joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins runs of which one begins where the one before ends."""
    found: list[tuple[int, int]] = []
    for begin, nbytes in runs:
        if found and found[-1][0] + found[-1][1] == begin:
            found[-1] = found[-1][0], found[-1][1] + nbytes
        else:
            found.append((begin, nbytes))
    return found


@given(LENGTHS, st.integers(0, 5))
def test_a_message_is_bounded_and_packs_short_runs_only(lengths: list[int], seed: int) -> None:
    runs = laid_out(lengths, seed)
    for message in messages(runs, memory(runs.total_bytes, 1), sends=True):
        assert 0 < message.nbytes <= MESSAGE_BYTES_MAX
        if len(message.rows) > 1:
            assert message.nbytes <= PACKED_BYTES_MAX
            assert message.rows[:, 2].max() < ALONE_BYTES_MIN
        assert bool(message.address) is (len(message.rows) == 1)


def test_packed_bytes_lie_side_by_side_in_the_buffer() -> None:
    runs = laid_out([1_000] * 50, seed=1)
    (message,) = messages(runs, memory(50_000, 1), sends=False)
    assert message.rows[:, 1].tolist() == list(range(0, 50_000, 1_000))
