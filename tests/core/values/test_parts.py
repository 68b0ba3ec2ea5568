"""The parts of a push, as the source keeps them and as it sends them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kvgrpc.core.values.block_ids import to_runs
from kvgrpc.core.values.call import ReadyPart
from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout, Region, uniform_layout
from kvgrpc.core.values.parts import Part, Parts
from kvgrpc.errors import Reason
from tests.core.nodes import lists, refused
from tests.core.values.planned import alone

HandedOver = tuple[list[tuple[list[int], tuple[int, int]]], int]

MOST = 1_000


def deep(layers: int = 4, blocks: int = 64) -> PoolLayout:
    return uniform_layout(Group("full", GroupKind.FULL_ATTENTION, layers, 16, blocks, 1, 1, "float16"), 64)


def two() -> PoolLayout:
    """Makes two groups of two layers: with 16 and with 32 tokens a block."""
    groups = tuple(replace(deep(2).groups[0], name=str(tokens), block_tokens=tokens) for tokens in (16, 32))
    regions = tuple(Region(i // 2, i % 2, 1, i * 64, 256, 64) for i in range(4))
    return PoolLayout(groups, regions, 64 * 256)


def hand(parts: Parts, *blocks: Sequence[int], layers: Any = None, last: bool = False) -> Part:
    """Hands over a part, and returns it."""
    ids = tuple(np.array(some, dtype=np.int64) for some in blocks)
    part = parts.check(ids, layers, last=last)
    parts.add(part, ids)
    return part


def say(
    *blocks: int, number: int = 0, known: tuple[int, ...] = (), layers: Any = None, last: bool = False
) -> ReadyPart:
    return ReadyPart(number, lists(blocks) if blocks else (), known, layers, last)


def moved(parts: Parts, target: Any, tokens: int) -> list[Any]:
    """Returns the blocks and layers that move, part by part."""
    return [
        ([ids.tolist() for ids in chunk.source], [ids.tolist() for ids in chunk.destination], chunk.layers)
        for chunk in parts.chunks(parts.between(0, len(parts)), target, tokens, alone(deep()))
    ]


@st.composite
def handed_over(draw: st.DrawFn) -> HandedOver:
    """Draws parts of 8 blocks in 4 layers, as (block ids, layers), and the number of blocks that are taken."""
    order = draw(st.permutations(range(8)))
    done, found = [0] * 4, []
    while min(done) < 8:
        first = draw(st.sampled_from([i for i in range(4) if done[i] < 8]))
        alike = next((i for i in range(first, 4) if done[i] != done[first]), 4)
        end = draw(st.integers(first + 1, alike))
        to = draw(st.integers(done[first] + 1, 8))
        found.append((order[done[first] : to], (first, end - first)))
        done[first:end] = [to] * (end - first)
    return found, draw(st.integers(1, 8))


@settings(max_examples=200)
@given(handed_over())
def test_both_sides_read_a_part_alike_and_each_block_is_said_once(made: HandedOver) -> None:
    rows, wanted = made
    source, destination = Parts(deep(), 128, MOST), Parts(deep(), 128, MOST)
    target = (np.arange(20, 20 + wanted),)
    said: list[int] = []
    for number, (ids, layers) in enumerate(rows):
        row = source.row(hand(source, ids, layers=layers, last=number == len(rows) - 1))
        destination.extend([row])
        said += [int(block) for _, listed in row.blocks for block in listed]
    assert sorted(said) == list(range(8))
    assert [ids.tolist() for ids in destination.blocks] == [ids.tolist() for ids in source.blocks]
    assert moved(destination, target, 16 * wanted) == moved(source, target, 16 * wanted)
    assert source.complete
    assert destination.complete


def test_parts_after_the_first_layer_name_blocks_by_their_place_only() -> None:
    parts = Parts(two(), 32, MOST)
    assert parts.row(hand(parts, (5, 6), (2,), layers=(0, 1))).known == ()
    row = parts.row(hand(parts, (5,), (2,), layers=(1, 1)))
    assert (row.blocks, row.known) == ((), (1, 1))
    last = parts.row(hand(parts, (6,), (), layers=(1, 1), last=True))
    assert (last.blocks, last.known) == ((), (1,))


def test_one_call_or_round_takes_so_many_parts_and_rows_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(two(), 96, MOST)
    for i in range(3):
        hand(parts, (i,), (i,))
    monkeypatch.setattr("kvgrpc.core.values.parts.BATCH_PARTS", 2)
    assert [part.number for part in parts.batch(0)] == [0, 1]
    assert [part.number for part in parts.batch(2)] == [2]
    for most in (1, 3):
        monkeypatch.setattr("kvgrpc.core.values.parts.BATCH_SPANS", most)
        assert [part.number for part in parts.batch(0)] == [0]
    assert parts.batch(3) == []


def test_what_some_parts_list_is_what_earlier_ones_do_not() -> None:
    parts = Parts(deep(), 64, MOST)
    hand(parts, (5, 6), layers=(0, 1))
    hand(parts, (5, 6, 7), layers=(1, 1))
    hand(parts, (5,), layers=(2, 2))
    hand(parts, (7, 8), layers=(0, 1))
    listed = [[ids.tolist() for ids in parts.listed(parts.between(i, end))] for i, end in ((0, 1), (1, 2), (1, 4))]
    assert listed == [[[5, 6]], [[7]], [[7, 8]]]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (say(7, number=1), Reason.INVALID_FIELD),
        (say(7, number=3), Reason.INVALID_FIELD),
        (say(number=2), Reason.INVALID_FIELD),
        (say(number=2, known=(0,)), Reason.INVALID_FIELD),
        (ReadyPart(2, lists((7,), (1,)), (), None, last=False), Reason.GROUP_MISMATCH),
        (ReadyPart(2, (*lists((7,)), *lists((8,))), (), None, last=False), Reason.GROUP_MISMATCH),
        (say(number=2, known=(1, 1)), Reason.GROUP_MISMATCH),
        (say(number=2, known=(3,), layers=(2, 2)), Reason.BLOCK_DUPLICATE),
        (say(7, number=2, known=(1,), layers=(2, 2)), Reason.BLOCK_DUPLICATE),
        (say(7, number=2, layers=(2, 2)), Reason.BLOCK_DUPLICATE),
        (say(7, number=2), Reason.BLOCK_DUPLICATE),
        (say(6, number=2, layers=(0, 2)), Reason.BLOCK_DUPLICATE),
        (say(64, number=2, layers=(0, 2)), Reason.BLOCK_OUT_OF_RANGE),
        (say(7, 8, 9, number=2, layers=(0, 2)), Reason.CONTENT_RANGE),
        (say(7, number=2, layers=(3, 2)), Reason.INVALID_FIELD),
        (say(7, number=2, layers=(0, 2), last=True), Reason.CONTENT_RANGE),
    ],
)
def test_a_row_that_is_wrong_takes_back_those_that_came_with_it(row: ReadyPart, reason: Reason) -> None:
    parts = Parts(deep(), 64, MOST)
    parts.extend([say(5, 6, layers=(0, 1))])
    before = moved(parts, (np.arange(4),), 64)
    with refused(reason):
        parts.extend([say(number=1, known=(2,), layers=(1, 1)), row])
    assert (len(parts), [ids.tolist() for ids in parts.blocks]) == (1, [[5, 6]])
    assert moved(parts, (np.arange(4),), 64) == before
    parts.extend([say(number=1, known=(2,), layers=(1, 3)), say(7, 8, number=2, last=True)])
    with refused(Reason.TRANSFER_ENDED):
        parts.extend([say(number=3)])


def test_a_push_has_so_many_blocks() -> None:
    parts = Parts(two(), 64, 5)
    hand(parts, (1, 2), (1,))
    with refused(Reason.LIMIT_EXCEEDED):
        hand(parts, (3, 4), (2,))
    hand(parts, (3,), (2,))
    with refused(Reason.LIMIT_EXCEEDED):
        parts.extend([say(4, number=2)])


@pytest.mark.parametrize(("name", "most"), [("PARTS_MAX", 2), ("SPANS_MAX", 4)])
def test_a_push_has_so_many_parts_and_rows_of_them(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"kvgrpc.core.values.parts.{name}", most)
    parts = Parts(two(), 64, MOST)
    hand(parts, (1,), (1,))
    hand(parts, (2,), (2,))
    with refused(Reason.LIMIT_EXCEEDED):
        hand(parts, (3,), ())


def test_long_lists_cost_the_wire_what_they_say_once() -> None:
    """The parts are of 80 layers of 16,384 scattered blocks; all but the first send only a number."""
    parts = Parts(deep(80, 32_768), 16 * 16_384, 65_536)
    blocks = range(0, 32_768, 2)
    rows = [parts.row(hand(parts, blocks, layers=(i, 1), last=i == 79)) for i in range(80)]
    assert [sum(len(to_runs(ids)[0]) for _, ids in row.blocks) for row in rows] == [16_384, *[0] * 79]
    assert {row.known for row in rows[1:]} == {(16_384,)}
