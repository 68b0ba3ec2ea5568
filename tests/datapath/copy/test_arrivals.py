"""Checksums of a posting are computed as its bytes arrive, over the destination's memory, on every data path."""

import queue
from collections.abc import Iterator
from typing import Any

import google_crc32c
import numpy as np
import pytest

from kvgrpc.core.actions import ComputeChecksums, MapPeer
from kvgrpc.core.events import ChecksumsComputed, Event, PeerMapped, PostingEnded
from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import MemoryKind, Segment
from kvgrpc.core.values.pieces import Pieces
from kvgrpc.datapath.base import PostingState
from kvgrpc.datapath.copy import checksums, crc32c
from kvgrpc.datapath.copy.checksums import sources_of
from kvgrpc.datapath.local_rank import LocalRank
from tests.datapath.movers import AT_SOURCE, BEST_FIRST, Held, post_of
from tests.datapath.peers import (
    DEADLINE_S,
    GUARD,
    IN_HOSTS,
    Bytes,
    Case,
    LocalPeer,
    Peer,
    ProcessPeer,
    expected,
    gather,
    private,
    runs_of,
)

Sizes = tuple[int, ...]

PEER_SIZES, OWN_SIZES = (1_500_001, 500_003), (700_003, 1_300_001)
BLOCK, BLOCKS = 10_007, 40
PAIR = (5, 9)
"""Lengths of two neighbours in one run, in units of 10 bytes; the first one spans two segments."""


class Rank:
    """A rank that computes checksums of its postings, and its reports."""

    def __init__(self, case: Case, peer: Peer, **options: Any) -> None:
        self.memory, self.parts = case.own_memory(OWN_SIZES)
        for part in self.parts:
            part[:] = GUARD
        self.reports: queue.SimpleQueue[Event] = queue.SimpleQueue()
        path = case.make(self.memory, "own")
        self.rank = LocalRank(0, self.memory, [path], self.reports.put, **options)
        self.rank.perform(MapPeer(0, "p", peer.endpoint(), 1, BEST_FIRST))
        mapped = self.reports.get(timeout=DEADLINE_S)
        assert isinstance(mapped, PeerMapped)
        assert mapped.data_path == path.name

    def read(self, runs: Runs, pieces: Pieces) -> tuple[PostingEnded, ChecksumsComputed]:
        """Returns a posting's end and its checksums, which come in any order."""
        self.rank.perform(post_of("a", "p", runs, checksums=ComputeChecksums(0, "s", pieces)))
        found = {type(event): event for event in (self.reports.get(timeout=DEADLINE_S) for _ in range(2))}
        ended, summed = found[PostingEnded], found[ChecksumsComputed]
        assert isinstance(ended, PostingEnded)
        assert isinstance(summed, ChecksumsComputed)
        return ended, summed


def moved() -> tuple[Runs, Pieces]:
    """Makes blocks of two pieces each, region by region as a plan lists them, and two neighbours in one run."""
    rng = np.random.default_rng(4)
    src, dst = (rng.permutation(90)[:BLOCKS] * BLOCK + 17 for _ in range(2))
    half = 90 * BLOCK + 1000
    regions = [(int(s), int(d), BLOCK) for s, d in zip(src, dst, strict=True)]
    regions += [(s + half, d + half, 64) for s, d, _ in regions]
    joined = OWN_SIZES[0] - 30
    blocks = [row for row in regions if not row[1] - 200 < joined < row[1] + BLOCK]
    runs = runs_of(*blocks, (3, joined, sum(PAIR) * 10))
    whole = [row for row in regions[:BLOCKS] if row in blocks]
    pieces = [(d, n) for s, d, _ in whole for d, n in ((d, BLOCK), (d + half, 64))]
    counts = [2] * len(whole) + [1, 1]
    pieces += [(joined, PAIR[0] * 10), (joined + PAIR[0] * 10, PAIR[1] * 10)]
    columns = ([offset for offset, _ in pieces], [nbytes for _, nbytes in pieces], counts)
    return runs, Pieces(*(np.array(column, dtype=np.int64) for column in columns))


def sums_of(memory: Bytes, pieces: Pieces) -> list[int]:
    """Returns the checksum of each block, computed by google_crc32c."""
    parts = [memory[at : at + n].tobytes() for at, n in zip(pieces.offsets, pieces.nbytes, strict=True)]
    ends = np.cumsum(pieces.counts).tolist()
    return [google_crc32c.value(b"".join(parts[first:end])) for first, end in zip([0, *ends][:-1], ends, strict=True)]


@pytest.fixture(scope="module", params=IN_HOSTS, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    chosen: Case = request.param
    return chosen


@pytest.fixture(scope="module")
def peer(case: Case) -> Iterator[Peer]:
    made = (LocalPeer if case.in_process else ProcessPeer)(case, 7, PEER_SIZES)
    yield made
    made.close()


def check(rank: Rank, peer: Peer, runs: Runs, pieces: Pieces) -> None:
    before = gather(rank.parts)
    ended, summed = rank.read(runs, pieces)
    assert (ended.done, ended.nbytes, summed.name, summed.message) == (True, runs.total_bytes, "s", "")
    now = gather(rank.parts)
    assert np.array_equal(now, expected(before, peer.content, runs))
    assert np.frombuffer(summed.values, dtype="<u4").tolist() == sums_of(now, pieces)
    assert rank.rank.close(DEADLINE_S)


@pytest.mark.parametrize("nbytes", [(), (0,), (64, 0), (0, 64, 0, 0), (200_000, 0, 200_000, 0, 0)], ids=str)
def test_empty_blocks_have_checksums(case: Case, peer: Peer, nbytes: Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "ARRIVED_BYTES", 64 << 10)
    sizes = np.array(nbytes, dtype=np.int64)
    offsets = np.cumsum(sizes) - sizes
    check(Rank(case, peer), peer, Runs(offsets, offsets, sizes), Pieces(offsets, sizes, np.ones_like(sizes)))


@pytest.mark.parametrize("slice_bytes", [64 << 10, 16 << 20])
def test_each_block_has_its_checksum(case: Case, peer: Peer, slice_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "ARRIVED_BYTES", slice_bytes)
    monkeypatch.setattr(crc32c, "SLICE_BYTES", slice_bytes)
    check(Rank(case, peer), peer, *moved())


def test_at_the_pace_of_a_cap_too(case: Case, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "ARRIVED_BYTES", 64 << 10)
    check(Rank(case, peer, bandwidth_limit_bytes_per_s=20e6), peer, *moved())


def test_bytes_of_an_earlier_posting_count_in_the_checksum(case: Case, peer: Peer) -> None:
    """A block may be larger than the bytes that may be in flight at once."""
    rank = Rank(case, peer)
    runs, pieces = moved()
    rest = Runs(runs.src[1:], runs.dst[1:], runs.nbytes[1:])
    rank.rank.perform(post_of("b", "p", Runs(runs.src[:1], runs.dst[:1], runs.nbytes[:1])))
    ended = rank.reports.get(timeout=DEADLINE_S)
    assert isinstance(ended, PostingEnded)
    check(rank, peer, rest, pieces)


def test_without_the_compiled_loop_too(case: Case, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crc32c, "checksummer", lambda: crc32c.checksum_in_loop)
    check(Rank(case, peer), peer, *moved())


def test_pieces_outside_the_memory_fail_the_posting_before_its_first_byte(case: Case, peer: Peer) -> None:
    rank = Rank(case, peer)
    outside = Pieces(*(np.array([n], dtype=np.int64) for n in (sum(OWN_SIZES), 64, 1)))
    rank.rank.perform(post_of("a", "p", runs_of((0, 0, 64)), checksums=ComputeChecksums(0, "s", outside)))
    ended = rank.reports.get(timeout=DEADLINE_S)
    assert isinstance(ended, PostingEnded)
    assert not ended.done
    assert (gather(rank.parts) == GUARD).all()
    assert rank.rank.close(DEADLINE_S)
    assert rank.reports.empty()


def held_rank(held: Held, events: "queue.SimpleQueue[Event]") -> LocalRank:
    rank = LocalRank(0, private((4096,))[0], [held], events.put)
    rank.perform(MapPeer(0, "p", AT_SOURCE, 1, ("held",)))
    assert isinstance(events.get(timeout=DEADLINE_S), PeerMapped)
    return rank


def one_block(nbytes: int = 4096) -> Pieces:
    return Pieces(*(np.array([n], dtype=np.int64) for n in (0, nbytes, 1)))


@pytest.mark.parametrize("state", [PostingState.DONE, PostingState.FAILED])
def test_checksums_are_of_what_is_there_and_a_failed_posting_has_none(state: PostingState) -> None:
    """The transport says that it is done, but moved nothing: the checksum is of the zeros in memory."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    held = Held()
    held.state = state
    rank = held_rank(held, events)
    rank.perform(post_of("a", "p", runs_of((0, 0, 4096)), checksums=ComputeChecksums(0, "s", one_block())))
    ended = events.get(timeout=DEADLINE_S)
    found = [ended, *([events.get(timeout=DEADLINE_S)] if state is PostingState.DONE else [])]
    rank.close(DEADLINE_S)
    assert events.empty()
    sums_found = [event.values for event in found if isinstance(event, ChecksumsComputed)]
    zeros = google_crc32c.value(bytes(4096)).to_bytes(4, "little")
    assert sums_found == ([zeros] if state is PostingState.DONE else [])


def test_a_rank_that_cannot_compute_checksums_says_so_and_moves_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    held = Held()
    held.state = PostingState.DONE
    rank = held_rank(held, events)
    monkeypatch.setattr(checksums, "Checksummer", lambda _: crc32c.Checksummer([Segment(1 << 20, 64, MemoryKind.CUDA)]))
    rank.perform(post_of("a", "p", runs_of((0, 0, 4096)), checksums=ComputeChecksums(0, "s", one_block())))
    said, ended = (events.get(timeout=DEADLINE_S) for _ in range(2))
    assert isinstance(said, ChecksumsComputed)
    assert "device" in said.message
    assert isinstance(ended, PostingEnded)
    assert ended.done
    rank.close(DEADLINE_S)


def test_where_pieces_come_from_is_known_only_when_the_runs_bring_just_them() -> None:
    runs = runs_of((1000, 50, 10), (0, 100, 30))
    pieces = Pieces(*(np.array(column, dtype=np.int64) for column in ([120, 50, 100], [10, 10, 20], [1, 2])))
    found = sources_of(pieces, runs)
    assert found is not None
    assert found.tolist() == [20, 1000, 0]
    for bad in ([90, 50, 100], [121, 50, 100], [45, 50, 100]):
        assert sources_of(Pieces(np.array(bad), pieces.nbytes, pieces.counts), runs) is None
    assert sources_of(pieces, runs_of((0, 100, 30))) is None
    assert sources_of(pieces, runs_of()) is None
