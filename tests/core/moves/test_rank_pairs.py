"""A lead has its ranks move every byte to its place when the ranks and blocks of the two engines differ."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.tables.transfers import State
from kvgrpc.core.values import bridge
from kvgrpc.core.values.endpoints import MemoryKind, NixlEndpoint, RankEndpoint, Segment
from kvgrpc.errors import PreconditionFailed, Reason
from tests.core.nodes import KEY, Lead, access_id, content, describe, endpoint, key_of, lists
from tests.core.pairs import MODES, Pair, Writers
from tests.core.split_kv import SplitKV, copy, made_split


class Unlike(Pair):
    """A source and a destination, each with its own layout and memory; postings move bytes when they end."""

    def __init__(
        self, source: SplitKV, destination: SplitKV, writers: Writers = frozenset(), data_path: str = "loopback"
    ) -> None:
        self.data_path = data_path
        self.kv = {"p": source, "d": destination, "e": destination}
        super().__init__(writers, describe("p", 1, pool=source.side.pool, world_size=source.side.ranks))

    def _lead(self, me: Any, writers: Writers, **limits: Any) -> Lead:
        side = self.kv[me.engine_id].side
        lead = super()._lead(replace(me, pool=side.pool, world_size=side.ranks), writers, **limits)
        lead.data_path = self.data_path
        return lead

    def move(self) -> list[actions.Post]:
        """Ends postings one after the other until none is left, and returns them."""
        done = []
        while self.posts:
            lead, post = self.posts[0]
            mine, theirs = self.kv[lead.me.engine_id], self.kv[post.peer.partition("@")[0]]
            here, there = mine.memories[post.rank], theirs.memories[post.peer_rank]
            source, destination = (there, here) if post.operation is actions.Operation.READ else (here, there)
            copy(post.runs, post.repack, source, destination, np.zeros_like(destination))
            self.moved(1, nbytes=(post.repack or post.runs).total_bytes)
            done.append(post)
        return done


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "equal ranks": ({"ranks": 2}, {"ranks": 2}),
    "one to two": ({"ranks": 1}, {"ranks": 2}),
    "two to one": ({"ranks": 2}, {"ranks": 1}),
    "two to four": ({"ranks": 2}, {"ranks": 4}),
    "two to three": ({"ranks": 2, "total": 6}, {"ranks": 3, "total": 6}),
    "fewer heads than ranks": ({"ranks": 4, "total": 2}, {"ranks": 1, "total": 2}),
    "latents": ({"ranks": 2, "latent": True}, {"ranks": 4, "latent": True}),
    "smaller blocks": ({"ranks": 1, "tokens": 32}, {"ranks": 1, "tokens": 16}),
    "larger blocks": ({"ranks": 2, "tokens": 16}, {"ranks": 1, "tokens": 48}),
    "another order": ({"ranks": 1}, {"ranks": 1, "order": "token_major"}),
    "keys and values apart": ({"ranks": 1, "apart": True}, {"ranks": 2}),
    "keys and values together": ({"ranks": 2}, {"ranks": 1, "apart": True}),
    "two stages to one": ({"ranks": 1, "stages": 2}, {"ranks": 1}),
    "shares of heads to stages of them": ({"ranks": 2}, {"ranks": 2, "stages": 2}),
    "all of it": ({"ranks": 1, "tokens": 32}, {"ranks": 2, "tokens": 16, "order": "token_major"}),
}
ALL = pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
LONG_AND_SHORT = pytest.mark.parametrize("dim", [1024, 8], ids=["long runs", "short runs"])


def both(kinds: tuple[dict[str, Any], dict[str, Any]], dim: int = 8) -> tuple[SplitKV, SplitKV]:
    return made_split(**kinds[0], dim=dim), made_split(**kinds[1], dim=dim)


def blocks_of(kv: SplitKV, tokens: int, have: int = 0) -> list[int]:
    """Returns scattered blocks for the tokens that are not there."""
    count = -(-tokens // kv.group.block_tokens) - have // kv.group.block_tokens
    return [(5 * i + 3) % kv.group.blocks for i in range(count)]


@LONG_AND_SHORT
@ALL
@pytest.mark.parametrize(("tokens", "have"), [(96, 0), (70, 0), (96, 48)])
def test_a_pull_brings_each_rank_its_heads(kinds: Any, tokens: int, have: int, dim: int) -> None:
    source, destination = both(kinds, dim)
    pair = Unlike(source, destination)
    given = blocks_of(source, tokens)
    source.fill(given)
    made = pair.call(pair.p, lambda c: events.FinishedBlocks(c, KEY, lists(given), content(tokens)))
    begin = have // destination.group.block_tokens * destination.group.block_tokens
    taken = blocks_of(destination, tokens, have)
    where = events.Destination(lists(taken), have)
    pair.call(pair.d, lambda c: events.PullBlocks(c, made.token, content(tokens), access_id(9), destination=where))
    pair.move()
    assert [transfer.state for transfer in pair.both()] == [State.SUCCEEDED] * 2
    end = len(given) * source.group.block_tokens
    destination.check(taken, range(begin, min(end, begin + len(taken) * destination.group.block_tokens)), begin)
    moved = pair.both()[1]
    assert sum(path.nbytes for path in moved.paths) == moved.nbytes_done
    assert moved.nbytes_done <= moved.nbytes


@LONG_AND_SHORT
@ALL
@MODES
def test_a_push_in_parts_brings_each_rank_its_heads(kinds: Any, writers: Writers, dim: int) -> None:
    source, destination = both(kinds, dim)
    pair = Unlike(source, destination, writers)
    given, taken = blocks_of(source, 96), blocks_of(destination, 96)
    source.fill(given)
    pair.register(pair.reserve(96, taken).token)
    half = len(given) // 2
    for part in (given[:half], given[half:]):
        for layer in range(2):
            last = part[-1:] == given[-1:] and layer == 1
            pair.finish(96, part, layers=(layer, 1), last=last)
            posts = pair.move()
            assert all(post.repack is None for post in posts if post.operation is actions.Operation.WRITE)
    assert [transfer.state for transfer in pair.both()] == [State.SUCCEEDED] * 2
    destination.check(taken, range(96))


def test_a_source_lets_the_destination_read_what_is_to_be_re_packed() -> None:
    pair = Unlike(*both(KINDS["another order"]), frozenset({"loopback"}))
    pair.register(pair.reserve(32).token)
    pair.finish(32, last=True)
    assert {post.operation for _, post in pair.posts} == {actions.Operation.READ}
    assert all(post.repack is not None for _, post in pair.posts)


@pytest.mark.parametrize(("data_path", "most_bytes"), [("shm", 1 << 14), ("cma", 1 << 12)])
def test_what_needs_no_staging_buffer_is_re_packed_in_larger_postings(
    data_path: str, most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridge, "STAGING_BYTES", 1 << 14)
    monkeypatch.setattr(bridge, "STAGED_AT_ONCE_BYTES", 1 << 12)
    pair = Unlike(*both(KINDS["another order"]), data_path=data_path)
    given = list(range(16))
    pair.kv["p"].fill(given)
    made = pair.call(pair.p, lambda c: events.FinishedBlocks(c, KEY, lists(given), content(256)))
    where = events.Destination(lists(given))
    pair.call(pair.d, lambda c: events.PullBlocks(c, made.token, content(256), access_id(9), destination=where))
    posts = pair.move()
    pair.kv["d"].check(given, range(256))
    sizes = [post.repack.staging_bytes for post in posts if post.repack is not None]
    assert max(sizes) == most_bytes


def test_a_rank_that_fails_fails_the_transfer_and_the_blocks_wait_for_all_others() -> None:
    pair = Unlike(*both(KINDS["two to four"]))
    made = pair.call(pair.p, lambda c: events.FinishedBlocks(c, KEY, lists(range(2)), content(32)))
    where = events.Destination(lists(range(2)))
    pair.call(pair.d, lambda c: events.PullBlocks(c, made.token, content(32), access_id(9), destination=where))
    assert sorted((post.rank, post.peer_rank) for _, post in pair.posts) == [(0, 0), (1, 0), (2, 1), (3, 1)]
    pair.moved(1, done=False, nbytes=0, message="it broke")
    failed = pair.both()[1]
    assert failed.failure is not None
    assert (failed.state, failed.failure.reason, failed.failure.rank) == (State.FAILED, Reason.DATA_PATH_FAILED, 0)
    assert sum(pair.d.state.pool.pins.quarantined) == 2
    pair.moved(2)
    assert sum(pair.d.state.pool.pins.quarantined) == 2
    pair.moved()
    assert sum(pair.d.state.pool.pins.quarantined) == 0


def test_every_rank_of_the_peer_is_mapped_before_anything_moves_and_each_end_is_waited_for() -> None:
    lead = Lead(describe("d", 2, pool=made_split(2).side.pool, world_size=2))
    peer = describe("p", 1, pool=made_split(4).side.pool, world_size=4)
    lead.admit(peer)
    life = key_of(peer)
    asked = sorted(lead.state.peers.lives[life].paths)
    assert asked == [(0, 0), (0, 1), (1, 2), (1, 3)]
    for rank, peer_rank in asked[:-1]:
        lead.feed(events.ProcessEnded(rank, life, drained=True, peer_rank=peer_rank))
    lead.feed(events.ProcessEnded(0, life, drained=True, peer_rank=3))
    assert lead.state.peers.lives[life].usable, "that rank has nothing to do with this one"
    lead.feed(events.ProcessEnded(1, life, drained=True, peer_rank=3))
    assert not lead.state.peers.lives[life].usable


def test_a_pair_that_cannot_be_reached_is_named() -> None:
    lead = Lead(describe("d", 2, pool=made_split(1).side.pool))
    peer = describe("p", 1, pool=made_split(2).side.pool, world_size=2)
    number = lead.ask(lambda c: events.ConnectPeer(c, peer.address))
    lead.feed(events.EndpointOffered(0, lead.one(actions.MakeOffer).key, endpoint()))
    lead.feed(events.PeerAnswered(peer.address, peer, (endpoint(0), endpoint(1))))
    lead.feed(events.PeerMapped(0, key_of(peer), "shm", "", peer_rank=0))
    lead.feed(events.PeerMapped(0, key_of(peer), "", "", (("shm", "it is far"),), peer_rank=1))
    with pytest.raises(PreconditionFailed, match="rank 1 of engine p"):
        lead.answer(number)


CUDA = RankEndpoint(0, nixl=NixlEndpoint("agent", b"", "UCX", (Segment(1 << 20, 64, MemoryKind.CUDA),)))


@LONG_AND_SHORT
def test_a_pull_that_a_device_would_have_to_re_pack_is_refused_before_anything_is_opened(dim: int) -> None:
    pair = Unlike(*both(KINDS["one to two"], dim))
    pair.feed(pair.d, events.EndpointOffered(0, "any", CUDA))
    made = pair.call(pair.p, lambda c: events.FinishedBlocks(c, KEY, lists(range(2)), content(32)))
    where = events.Destination(lists(range(2)))
    pair.call(pair.d, lambda c: events.PullBlocks(c, made.token, content(32), access_id(9), destination=where))
    ended = pair.both()[1]
    if dim > 8:
        assert (ended.state, len(pair.posts)) == (State.ACTIVE, 2), "runs are long enough to be moved by themselves"
        return
    assert ended.failure is not None
    assert (ended.failure.reason, ended.failure.phase) == (Reason.INCOMPATIBLE_POOLS, "handshake")
    assert not len(pair.d.state.pool.pins)
    assert not any(isinstance(action, actions.SendOpen) for action in pair.sent)


def test_a_push_that_a_device_would_have_to_re_pack_is_refused_by_its_destination() -> None:
    pair = Unlike(*both(KINDS["another order"]))
    pair.feed(pair.d, events.EndpointOffered(0, "any", CUDA))
    reserved = pair.reserve(32)
    pair.register(reserved.token)
    pair.finish(32, last=True)
    source, destination = pair.both()
    assert destination.failure is not None
    assert destination.failure.reason is Reason.INCOMPATIBLE_POOLS
    assert not pair.posts
    assert source.over is False, "another destination may come"
