"""Windows and states from block tables to bytes: a policy and a node on either side, and all bytes that move."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.strategies import DataObject

from kvgrpc.core import events
from kvgrpc.core.events import Destination, Opened
from kvgrpc.core.policy.policy import Policy
from kvgrpc.core.policy.values import (
    DROPPED,
    Arrival,
    Give,
    HandOverBlocks,
    HandOverPart,
    ModeChoice,
    Outcome,
    Reserve,
    Rules,
    Start,
    Take,
)
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.tables.transfers import State
from kvgrpc.core.values.content import chain
from kvgrpc.core.values.layout import WHOLE, Group, GroupKind, PoolLayout, Region
from kvgrpc.errors import InvalidRequest, OutOfRange, Reason
from tests.core.nodes import KEY, Lead, access_id, claim, content, describe, grant, lists, refused
from tests.core.pairs import READING, WRITING, Pair, Writers

R = "r1"
BLOCKS, BLOCK_BYTES, LAYERS = 64, 4, 2
SIZES = (16, 32, 8)
"""Tokens of a block, for each group."""
FULL, WINDOW, STATE = GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW, GroupKind.STATE
BOTH = pytest.mark.parametrize("writers", [READING, WRITING], ids=["destination moves", "source moves"])


def pool_of(*kinds: GroupKind, window: int = 32, space: str = "") -> PoolLayout:
    """Makes a pool with a region for each layer of each group; in one block space all groups lie on the same bytes."""
    groups: list[Group] = []
    regions: list[Region] = []
    for i, (kind, tokens) in enumerate(zip(kinds, SIZES, strict=False)):
        windowed = window if kind is WINDOW else 0
        groups.append(Group(f"g{i}", kind, LAYERS, tokens, BLOCKS, 1, 1, "uint8", window_tokens=windowed, space=space))
        for layer in range(LAYERS):
            at = (layer if space else len(regions)) * BLOCKS * BLOCK_BYTES
            regions.append(Region(i, layer, 1, at, BLOCK_BYTES, BLOCK_BYTES, WHOLE[kind]))
    return PoolLayout(tuple(groups), tuple(regions), len(regions) * BLOCKS * BLOCK_BYTES)


def table_of(pool: PoolLayout, tokens: int, drawn: random.Random) -> list[list[int]]:
    """Draws blocks for `tokens` tokens; the list of a state begins with older blocks."""
    counts = [3 if group.kind is STATE else -(-tokens // group.block_tokens) for group in pool.groups]
    if not pool.shared_spaces:
        return [drawn.sample(range(BLOCKS), count) for count in counts]
    left = drawn.sample(range(BLOCKS), sum(counts))
    return [[left.pop() for _ in range(count)] for count in counts]


def worn(pool: PoolLayout, table: list[list[int]], computed: int) -> list[list[int]]:
    """Returns the table of an engine that drops blocks which no step after `computed` tokens reads."""
    left = []
    for group, ids in zip(pool.groups, table, strict=True):
        gone = max(computed + 1 - group.window_tokens, 0) // group.block_tokens if group.window_tokens else 0
        left.append([DROPPED if at < gone else block for at, block in enumerate(ids)])
    return left


class Scene:
    """A prompt that goes from p to d, with the memory of both."""

    def __init__(self, pool: PoolLayout, mode: ModeChoice, writers: Writers, **rules: Any) -> None:
        self.pool, self.mode = pool, mode
        self.pair = Pair(writers, p=describe("p", 1, pool=pool))
        self.p, self.d = (Policy(Rules(pool.groups, **rules)) for _ in range(2))
        self.source = np.arange(pool.total_bytes)
        self.target = np.full(pool.total_bytes, -1)
        self.token = b""

    def prefill(self, prompt: int, chunks: list[int], drawn: random.Random) -> list[list[int]]:
        """Computes a prompt in chunks that end at `chunks`, hands it over, and returns its table at the end."""
        tokens = self.p.arrived(Arrival(R, prompt, give=Give(self.mode))).prompt_tokens
        begun, table = 0, table_of(self.pool, tokens, drawn)
        for end in [*(c for c in chunks if c < tokens), tokens]:
            table = worn(self.pool, table, begun)
            self.p.computed(R, table, end, 0)
            self.perform(tokens)
            begun = end
        assert self.p.finished(R, table, tokens, Outcome.COMPLETE).handed_over
        self.perform(tokens)
        return table

    def perform(self, tokens: int) -> None:
        for task in self.p.take_tasks():
            if isinstance(task, HandOverBlocks):
                made = self.pair.finish(task.tokens, *task.blocks, waits_for=events.WaitsFor.READERS)
                self.token = made.token
            else:
                assert isinstance(task, HandOverPart)
                self.pair.finish(tokens, *task.blocks, layers=task.layers, last=task.last)
            self.move()

    def take(self, prompt: int, have: int, table: list[list[int]]) -> int:
        """Lets d take missing KV, of a push as far as it was handed over; returns how many tokens d will have."""
        offer = self.p.arrived(Arrival(R, prompt, give=Give(self.mode))).prompt_tokens
        self.d.arrived(Arrival(R, prompt, Take(self.mode, offer)))
        self.d.allocated(R, table, have, self.d.match(R, have).tokens)
        task = self.d.take_tasks()[-1]
        wanted = chain(range(prompt), weights_revision="w", also_at=offer)
        if isinstance(task, Start):
            to = Destination(lists(*task.blocks), task.have_tokens)
            self.pair.call(self.pair.d, lambda c: events.PullBlocks(c, self.token, wanted, access_id(7), offer, to))
        else:
            assert isinstance(task, Reserve)
            where = lists(*task.blocks)
            made = self.pair.call(
                self.pair.d,
                lambda c: events.ReserveBlocks(c, KEY, where, content(offer), task.have_tokens, task.use_tokens),
            )
            self.pair.register(made.token)
        self.move()
        return offer

    def move(self) -> None:
        """Moves bytes as they were posted."""
        while self.pair.posts:
            for _, post in self.pair.posts:
                for src, dst, nbytes in zip(post.runs.src, post.runs.dst, post.runs.nbytes, strict=True):
                    self.target[dst : dst + nbytes] = self.source[src : src + nbytes]
            self.pair.moved()

    def check(self, given: list[list[int]], taken: list[list[int]], have: int, tokens: int) -> None:
        """Asserts that d has the bytes of exactly those blocks that it lacks and will read, each in its place."""
        expected = np.full(self.pool.total_bytes, -1)
        for region in self.pool.regions:
            for src, dst in needed(self.pool.groups[region.group], given, taken, region.group, have, tokens):
                to, of = region.offset + dst * BLOCK_BYTES, region.offset + src * BLOCK_BYTES
                expected[to : to + BLOCK_BYTES] = self.source[of : of + BLOCK_BYTES]
        assert np.array_equal(self.target, expected)
        assert [transfer.state for transfer in self.pair.both()] == [State.SUCCEEDED] * 2


def needed(
    group: Group, given: list[list[int]], taken: list[list[int]], i: int, have: int, tokens: int
) -> Iterator[tuple[int, int]]:
    """Yields the blocks that must move: those that hold a token in the window, and that the destination lacks."""
    if have >= tokens:
        return
    if group.kind is STATE:
        yield given[i][-1], taken[i][-1]
        return
    read = range(max(tokens - group.window_tokens, 0) if group.window_tokens else 0, tokens)
    whole = have // group.block_tokens
    for at in sorted({token // group.block_tokens for token in read}):
        if at >= whole:
            yield given[i][at], taken[i][at]


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_exactly_the_blocks_that_are_read_and_missing_move(data: DataObject) -> None:
    draw = data.draw
    kinds = draw(st.lists(st.sampled_from([FULL, WINDOW, STATE]), min_size=1, max_size=3))
    pool = pool_of(*kinds, window=draw(st.integers(1, 130)), space=draw(st.sampled_from(["", "shared"])))
    ranges = draw(st.sampled_from([(), ((0, 1), (1, 1))]))
    mode = draw(st.sampled_from([ModeChoice.PULL, ModeChoice.PUSH]))
    side = draw(st.sampled_from([READING, WRITING]))
    scene = Scene(pool, mode, side, backoff_tokens=int(STATE in kinds), layer_ranges=ranges)
    prompt, have = draw(st.integers(2, 200)), draw(st.integers(0, 200))
    drawn = random.Random(draw(st.integers(0, 99)))
    taken = worn(pool, table_of(pool, prompt, drawn), have)
    chunks = sorted(draw(st.lists(st.integers(1, 200), max_size=4)))
    if scene.mode is ModeChoice.PUSH and draw(st.booleans()):
        tokens = scene.take(prompt, have, taken)
        given = scene.prefill(prompt, chunks, drawn)
    else:
        given = scene.prefill(prompt, chunks, drawn)
        tokens = scene.take(prompt, have, taken)
    scene.check(given, taken, have, tokens)


# ---- the arithmetic


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 150), st.integers(1, 33))
def test_a_longer_prompt_never_needs_earlier_blocks_of_a_window(
    tokens: int, have: int, window: int, block_tokens: int
) -> None:
    group = Group("w", WINDOW, 1, block_tokens, 64, 1, 1, "uint8", window_tokens=window)
    read = range(max(tokens - window, 0) if window else 0, tokens)
    blocks = sorted({token // block_tokens for token in read})
    assert group.blocks_of(tokens) == len(blocks)
    assert not blocks or group.first_of(tokens) == blocks[0]
    assert group.first_of(tokens) <= group.first_of(tokens + 1)
    whole = [at for at in blocks if (at + 1) * block_tokens <= have]
    assert min(group.held_of(tokens, have), len(blocks)) == len(whole)


# ---- what is refused


def test_a_policy_never_gives_or_takes_a_block_that_was_dropped() -> None:
    groups = pool_of(FULL, WINDOW, window=33).groups
    table, worn = [[1, 2, 3, 4], [DROPPED, 7]], [[1, 2, 3, 4], [DROPPED, DROPPED]]
    made = Policy(Rules(groups))
    made.arrived(Arrival(R, 64, give=Give(ModeChoice.PULL)))
    for wrong in (table, worn):  # the first token of the window is the last one of the first block
        with refused(Reason.BLOCK_COUNT_MISMATCH, InvalidRequest):
            made.finished(R, wrong, 64, Outcome.COMPLETE)
    assert made.take_tasks() == []
    made = Policy(Rules(groups))
    made.arrived(Arrival(R, 65, give=Give(ModeChoice.PULL)))
    made.finished(R, [[1, 2, 3, 4, 5], [DROPPED, 7, 8]], 65, Outcome.COMPLETE)
    assert made.take_tasks() == [HandOverBlocks(R, ((1, 2, 3, 4, 5), (7, 8)), 65, 0)]


def test_a_shorter_prompt_is_not_taken_where_its_window_begins_in_another_block() -> None:
    for window, tokens in ((200, 48), (32, 0)):
        made = Policy(Rules(pool_of(FULL, WINDOW, window=window).groups))
        made.arrived(Arrival(R, 50, Take(ModeChoice.PULL, 150)))
        assert made.match(R, 0).tokens == tokens


def test_a_lease_serves_a_shorter_prompt_only_where_its_window_begins_in_the_same_block() -> None:
    pool = pool_of(FULL, WINDOW, window=40)
    lead, d = Lead(describe("p", 1, pool=pool)), describe("d", 2, pool=pool)
    lead.admit(d)
    made = lead.finish(128, range(8), (5, 6))
    refusal, row = lead.opened(
        d,
        *(AccessOpening(access_id(number), made.token, claim=claim(tokens)) for number, tokens in ((1, 48), (2, 112))),
    )
    assert refusal.reason is Reason.CONTENT_RANGE
    assert "the last 40 tokens" in refusal.message
    assert isinstance(row, Opened)
    assert [ids.tolist() for _, ids in row.blocks] == [[*range(7)], [5, 6]]


def test_a_list_of_more_or_less_than_the_window_is_refused() -> None:
    pool = pool_of(FULL, WINDOW, window=40)
    source, lead = describe("p", 1, pool=pool), Lead(describe("d", 2, pool=pool))
    lead.admit(source)
    token = grant(source, tokens=128)
    for wrong in (range(4), (5,)):
        with refused(Reason.CONTENT_RANGE):
            lead.finish(128, range(8), wrong, key=b"another request's")
        with refused(Reason.BLOCK_COUNT_MISMATCH):
            lead.pull(token, 128, range(8), wrong)
    with refused(Reason.CONTENT_RANGE, OutOfRange):
        lead.pull(token, 128, use_tokens=48)
    assert lead.pull(token, 128, range(6, 8), (6,), have_tokens=96)


@BOTH
def test_a_push_serves_a_shorter_prompt_only_where_its_window_begins_in_the_same_block(writers: Writers) -> None:
    for use, served in ((112, True), (48, False)):
        pair = Pair(writers, p=describe("p", 1, pool=pool_of(FULL, WINDOW, window=40)))
        blocks = range(-(-use // 16)), range(2)
        pair.register(pair.reserve(128, *blocks, use_tokens=use).token)
        pair.finish(128, range(8), (5, 6))
        assert bool(pair.posts) is served
        assert (pair.reasons()[0] is None) is True
        assert ("the last 40 tokens" in pair.p.state.send.leases.get(pair.both()[0].lease_id).trouble) is not served
