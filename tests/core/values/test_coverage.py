"""Runs are covered by granted blocks exactly if each of their bytes is one of these blocks' bytes."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.coverage import covered
from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout, Region
from tests.core.nodes import aliased, full, hybrid, ids
from tests.core.random_layouts import Move, moves

NEAR = 3
"""Bytes around the start and end of a block at which runs are tried."""


def of_rank(pool: PoolLayout, stage: int, blocks: Blocks) -> list[set[int]]:
    """Returns the bytes of these blocks in the memory of a rank of that stage, region by region."""
    return [
        {
            byte
            for block in blocks[region.group].tolist()
            for byte in range(region.offset + block * region.stride_bytes, _end(region, block))
        }
        for region in pool.regions
        if region.stage == stage
    ]


def _end(region: Region, block: int) -> int:
    return region.offset + block * region.stride_bytes + region.block_bytes


def one_by_one(pool: PoolLayout, stage: int, blocks: Blocks, runs: list[tuple[int, int]]) -> bool:
    known = of_rank(pool, stage, blocks)
    return all(n > 0 and any(known_in.issuperset(range(at, at + n)) for known_in in known) for at, n in runs)


def asked(pool: PoolLayout, stage: int, blocks: Blocks, runs: list[tuple[int, int]]) -> bool:
    offsets, nbytes = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    return covered(pool, stage, blocks, offsets, nbytes)


@st.composite
def asks(draw: st.DrawFn) -> tuple[PoolLayout, int, Blocks, list[tuple[int, int]]]:
    """Draws blocks of a random pool, and runs that start and end near the blocks of one of its stages."""
    pool = draw(moves()).source.side.pool
    stage = draw(st.integers(0, pool.stages - 1))
    blocks: Any = tuple(
        np.array(sorted(draw(st.sets(st.integers(0, group.blocks - 1)))), dtype=np.int64) for group in pool.groups
    )
    runs = []
    for _ in range(draw(st.integers(1, 3))):
        region = draw(st.sampled_from([region for region in pool.regions if region.stage == stage]))
        listed = blocks[region.group].tolist() or [0]
        first, last = draw(st.sampled_from(listed)), draw(st.sampled_from(listed))
        begin = region.offset + first * region.stride_bytes + draw(st.integers(-NEAR, NEAR))
        end = _end(region, last) + draw(st.integers(-NEAR, NEAR))
        if draw(st.booleans()):
            begin, end = _end(region, first) - region.block_bytes, _end(region, last)
        runs.append((begin, end - begin))
    return pool, stage, blocks, runs


@settings(max_examples=1_000)
@given(asks())
def test_runs_are_covered_exactly_where_each_of_their_bytes_is_of_a_granted_block(
    ask: tuple[PoolLayout, int, Blocks, list[tuple[int, int]]],
) -> None:
    assert asked(*ask) == one_by_one(*ask)


@settings(max_examples=500)
@given(moves())
def test_all_that_a_bridge_reads_is_covered_by_the_blocks_that_it_is_planned_for(made: Move) -> None:
    source = made.source
    for some in made.bridge(1).plan([made.chunk]) + made.bridge(1 << 20).plan([made.chunk]):
        stage = source.stage(some.pair.source_rank)
        assert covered(source.side.pool, stage, made.chunk.source, some.runs.src, some.runs.nbytes)


@pytest.mark.parametrize(
    ("blocks", "run", "fine"),
    [
        ((2, 3), (16, 16), True),
        ((2, 3), (16, 17), False),
        ((2, 3), (15, 2), False),
        ((2, 4), (16, 24), False),
        ((63,), (63 * 8, 8), True),
        ((63,), (63 * 8, 9), False),
        ((0, 63), (63 * 8, 16), False),
        ((0,), (64 * 8, 8), True),
        ((0,), (128 * 8, 8), False),
        ((), (0, 1), False),
        ((0,), (0, 0), False),
        ((0,), (-1, 2), False),
        ((0,), (2**53 - 1, 2**53 - 1), False),
        (range(64), (0, 2**53 - 1), False),
    ],
)
def test_a_run_may_go_on_into_granted_blocks_that_lie_side_by_side(blocks: Any, run: Any, fine: bool) -> None:
    assert asked(full(), 0, (ids(*blocks),), [run]) is fine


def test_no_runs_are_covered_by_anything() -> None:
    assert covered(full(), 0, (ids(),), ids(), ids())


def test_one_group_is_as_good_as_another_where_they_lie_on_the_same_bytes() -> None:
    assert asked(aliased(), 0, (ids(), ids(1)), [(8, 8)])
    assert asked(aliased(), 0, (ids(1), ids()), [(8, 8)])
    assert not asked(aliased(), 0, (ids(2), ids(3)), [(8, 8)])
    assert asked(hybrid(), 0, (ids(1), ids(2)), [(8, 8), (64 * 8 + 16, 8)])
    assert not asked(hybrid(), 0, (ids(1), ids(2)), [(16, 8)])


def test_blocks_of_several_layers_may_stand_in_one_row() -> None:
    """Each row has a block of both layers, followed by a gap."""
    group = Group("full", GroupKind.FULL_ATTENTION, 2, 16, 4, 1, 1, "uint8")
    pool = PoolLayout((group,), (Region(0, 0, 1, 5, 40, 16), Region(0, 1, 1, 21, 40, 16)), 5 + 4 * 40)
    for at, n, fine in ((45, 16, True), (61, 16, True), (60, 2, False), (77, 1, False), (85, 16, False), (4, 1, False)):
        assert asked(pool, 0, (ids(1),), [(at, n)]) is fine, at


def test_a_rank_sends_of_its_own_stage() -> None:
    group = Group("full", GroupKind.FULL_ATTENTION, 2, 16, 4, 1, 1, "uint8")
    pool = PoolLayout((group,), (Region(0, 0, 1, 0, 16, 16), Region(0, 1, 1, 64, 16, 16, stage=1)), 128)
    assert asked(pool, 0, (ids(1),), [(16, 16)])
    assert not asked(pool, 0, (ids(1),), [(80, 16)])
    assert asked(pool, 1, (ids(1),), [(80, 16)])
