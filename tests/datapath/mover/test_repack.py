"""Reads that end with a re-pack, on every data path, in an arena whose pieces are never reused too soon."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvgrpc.core.actions import ComputeChecksums, Operation, Post
from kvgrpc.core.events import PostingEnded, Rekeyed
from kvgrpc.core.values.endpoints import MemoryKind, RankEndpoint, Segment
from kvgrpc.core.values.pieces import Pieces
from kvgrpc.core.values.strips import Repack
from kvgrpc.datapath.base import DataPath, DataPathFailed
from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.datapath.nixl.metadata import parse, unseal
from kvgrpc.datapath.nixl.path import NixlPath
from kvgrpc.datapath.reports import Disconnected
from kvgrpc.datapath.staging_arena import StagingArena
from tests.datapath.loopback import Faults, LoopbackPath
from tests.datapath.movers import AT_SOURCE, DONE, FAILED, NBYTES, WHOLE, Held, Rank, until
from tests.datapath.peers import (
    CASES,
    DEADLINE_S,
    GUARD,
    Case,
    LocalPeer,
    Peer,
    ProcessPeer,
    content,
    runs_of,
)
from tests.datapath.repacks import BLOCK, BLOCKS, HEAD_OF_EACH, THREE, post, repacked, staging_rank

PATHS = [case for case in CASES if case.name in ("loopback", "shm", "shm-loop", "cma", "nixl")]

LIMITS = pytest.mark.parametrize(
    "limit", [{}, {"bandwidth_limit_bytes_per_s": 64.0 * NBYTES}], ids=["at once", "in slices"]
)


@pytest.fixture(params=PATHS, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    chosen: Case = request.param
    return chosen


@pytest.fixture
def peer(case: Case) -> Iterator[Peer]:
    peer = (LocalPeer if case.in_process else ProcessPeer)(case, 4, (NBYTES,))
    yield peer
    peer.close()


@LIMITS
def test_blocks_are_read_into_staging_and_their_strips_copied_and_no_other_byte_changes(
    case: Case, peer: Peer, limit: dict[str, Any]
) -> None:
    rank = Rank(lambda memory: [case.make(memory, "own")], **limit)
    rank.connect("p", peer.endpoint())
    for name in "ab":
        rank.bytes[:] = GUARD
        rank.post(name, "p", BLOCKS, repack=THREE)
        ended = rank.next(PostingEnded)
        assert (ended.posting_id, ended.done, ended.message) == (name, True, "")
        assert ended.nbytes == HEAD_OF_EACH.total_bytes
        assert np.array_equal(rank.bytes, repacked(peer.content))
    rank.post("plain", "p", WHOLE)
    assert rank.next(PostingEnded).done
    assert np.array_equal(rank.bytes, peer.content)
    assert rank.mover.close(DEADLINE_S)


@LIMITS
def test_out_of_a_mapped_pool_strips_are_copied_without_a_staging_buffer(
    case: Case, peer: Peer, limit: dict[str, Any]
) -> None:
    rank = Rank(lambda memory: [case.make(memory, "own")], staging_bytes=BLOCK, **limit)
    rank.connect("p", peer.endpoint())
    rank.post("a", "p", BLOCKS, repack=THREE)
    ended = rank.next(PostingEnded)
    mapped = case.name.startswith("shm")
    assert (ended.done, ended.nbytes) == ((True, HEAD_OF_EACH.total_bytes) if mapped else (False, 0))
    assert ("does not fit" in ended.message) != mapped
    assert np.array_equal(rank.bytes, repacked(peer.content) if mapped else np.full(NBYTES, GUARD, np.uint8))
    assert rank.mover.close(DEADLINE_S)


def test_two_ranks_of_a_peer_are_re_packed_at_once(case: Case) -> None:
    """The arena has room for one re-pack at a time, or for both."""
    make = LocalPeer if case.in_process else ProcessPeer
    peers = [make(case, seed, (NBYTES,)) for seed in (5, 6)]
    second = Repack((replace(HEAD_OF_EACH, dst=HEAD_OF_EACH.dst + NBYTES // 2),), 3 * BLOCK)
    for room in (3, 6):
        rank = Rank(lambda memory: [case.make(memory, "own")], staging_bytes=room * BLOCK)
        for number, peer in enumerate(peers):
            rank.connect("p", replace(peer.endpoint(), rank=number))
        rank.post("a", "p", BLOCKS, repack=THREE, peer_rank=0)
        rank.post("b", "p", BLOCKS, repack=second, peer_rank=1)
        assert all(rank.next(PostingEnded).done for _ in peers)
        half = NBYTES // 2
        assert np.array_equal(rank.bytes[:half], repacked(peers[0].content)[:half])
        assert np.array_equal(rank.bytes[half:], repacked(peers[1].content)[:half])
        assert rank.mover.close(DEADLINE_S)
    for peer in peers:
        peer.close()


def test_what_nixl_offers_to_peers_never_covers_the_staging_arena() -> None:
    case = next(case for case in CASES if case.name == "nixl")
    peer = ProcessPeer(case, 4, (NBYTES,))
    paths = list[NixlPath]()

    def make(memory: PrivateMemory) -> list[DataPath]:
        paths.append(NixlPath(memory))
        return [paths[0]]

    rank = Rank(make)
    for life in range(2):
        rank.connect("p", peer.endpoint())
        rank.bytes[:] = GUARD
        rank.post("a", "p", BLOCKS, repack=THREE)
        assert rank.next(PostingEnded).done
        assert np.array_equal(rank.bytes, repacked(peer.content))
        part = paths[0].offer(RankEndpoint(1)).nixl
        assert part is not None
        assert [segment.address for segment in part.segments] == [rank.bytes.ctypes.data]
        assert [row[1:3] for row in parse(unseal(part.metadata)).registered] == [(rank.bytes.ctypes.data, NBYTES)]
        if life == 0:
            rank.mover.rekey()
            rank.next(Disconnected)
            rank.next(Rekeyed)
    assert rank.mover.close(DEADLINE_S)
    peer.close()


def test_a_posting_that_finds_no_room_waits_and_none_overtakes_it() -> None:
    held = Held()
    rank = staging_rank(held)
    for name, blocks in (("a", 5), ("b", 4), ("c", 3)):
        post(rank, name, blocks)
    rank.mover.connect("h2", RankEndpoint(0), ["held"])
    rank.mapped()  # all is posted: c has room, but b came first
    assert len(held.buffers) == 1
    held.state = DONE
    assert [rank.next(PostingEnded).posting_id for _ in "abc"] == ["a", "b", "c"]
    assert len(held.buffers) == 3
    assert rank.mover.close(0.0)


def test_pieces_that_are_used_at_once_do_not_overlap() -> None:
    held = Held()
    rank = staging_rank(held, room=12)
    for name in "abcd":
        post(rank, name, 3)
    until(lambda: len(held.buffers) == 4)
    begins = sorted(buffer.segment.address for buffer in held.buffers)
    assert np.diff(begins).min() >= 3 * BLOCK
    (arena,) = {(buffer.arena.address, buffer.arena.nbytes) for buffer in held.buffers}
    assert arena == (begins[0], 12 * BLOCK)
    held.state = FAILED
    assert [rank.next(PostingEnded).done for _ in "abcd"] == [False] * 4
    assert rank.mover.close(0.0)


def test_many_postings_share_little_room() -> None:
    source = LoopbackPath(PrivateMemory.of(memory := content(3, NBYTES)), "source")
    rank = Rank(lambda own: [LoopbackPath(own, "own")], staging_bytes=4 * BLOCK)
    rank.connect("p", AT_SOURCE)
    for i in range(50):
        rank.post(str(i), "p", BLOCKS, repack=THREE)
    assert {rank.next(PostingEnded).posting_id for _ in range(50)} == set(map(str, range(50)))
    assert np.array_equal(rank.bytes, repacked(memory))
    assert rank.mover.close(0.0)
    source.close()


def test_a_posting_that_needs_more_than_the_arena_is_refused_and_others_go_on() -> None:
    held = Held()
    rank = staging_rank(held)
    post(rank, "large", 9)
    ended = rank.next(PostingEnded)
    assert (ended.done, ended.quiesced) == (False, True)
    assert f"{9 * BLOCK} bytes does not fit into the {8 * BLOCK} bytes" in ended.message
    held.state = DONE
    post(rank, "a", 8)
    assert rank.next(PostingEnded).done
    assert rank.mover.close(0.0)


def test_a_failed_read_copies_nothing() -> None:
    faults = Faults(fail_after_bytes=0)
    source = LoopbackPath(PrivateMemory.of(content(3, NBYTES)), "source")
    rank = Rank(lambda own: [LoopbackPath(own, "own", faults)])
    rank.connect("p", AT_SOURCE)
    rank.post("a", "p", BLOCKS, repack=THREE)
    ended = rank.next(PostingEnded)
    assert (ended.done, ended.quiesced, ended.nbytes) == (False, True, 0)
    assert (rank.bytes == GUARD).all()
    assert rank.mover.close(0.0)
    source.close()


SUMS = ComputeChecksums(1, "s", Pieces(*np.zeros((3, 0), dtype=np.int64)))
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a write": ({"operation": Operation.WRITE}, "only a read"),
    "checksums on the way": ({"checksums": SUMS}, "no checksums"),
    "runs past the buffer": ({"runs": runs_of((0, 1, 3 * BLOCK))}, "destination's memory, which has"),
    "runs past the source": ({"runs": runs_of((NBYTES, 0, 1))}, "source's memory, which has"),
    "strips past the memory": (
        {"repack": Repack((replace(HEAD_OF_EACH, dst=HEAD_OF_EACH.dst + NBYTES),), 3 * BLOCK)},
        "rank's memory",
    ),
    "strips past the buffer": ({"repack": replace(THREE, staging_bytes=BLOCK)}, "staging buffer"),
    "a buffer of fewer than no bytes": ({"repack": Repack((), -1), "runs": runs_of()}, "does not fit"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_re_pack_that_cannot_be_done_is_refused_before_a_byte_moves(case: str) -> None:
    change, why = REFUSED[case]
    source = LoopbackPath(PrivateMemory.of(content(3, NBYTES)), "source")
    rank = Rank(lambda own: [LoopbackPath(own, "own")])
    rank.connect("p", AT_SOURCE)
    rank.mover.post(replace(Post(1, "a", "p", BLOCKS, "t", repack=THREE), **change))
    ended = rank.next(PostingEnded)
    assert (ended.done, ended.quiesced, ended.wire_s) == (False, True, 0.0)
    assert why in ended.message
    assert (rank.bytes == GUARD).all()
    assert rank.mover.close(0.0)
    source.close()


def test_memory_on_a_device_is_not_re_packed_into() -> None:
    memory = PrivateMemory([Segment(1 << 20, NBYTES, MemoryKind.CUDA)])
    staging = StagingArena(0, memory, 1, NBYTES)
    with pytest.raises(DataPathFailed, match="on a device"):
        staging.check(Post(0, "a", "p", BLOCKS, "t", repack=THREE))


def test_a_data_path_without_staging_refuses() -> None:
    class Plain:
        why = "plain"
        process = None

        def read(self, *_: object) -> None:
            raise AssertionError

        def close(self) -> None:
            pass

    held = Held()
    held.connect = lambda *_: Plain()  # type: ignore[method-assign,assignment]
    rank = staging_rank(held)
    post(rank, "a", 3)
    assert "held reads into no staging buffer" in rank.next(PostingEnded).message
    assert rank.mover.close(0.0)
