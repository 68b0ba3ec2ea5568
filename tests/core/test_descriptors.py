"""Block ids to bytes: every listed block is copied exactly once, and no byte outside."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgrpc.core.descriptors import check_ids, expand_runs, plan_runs, to_runs
from kvgrpc.core.layout import Group, GroupKind, PoolLayout, Region, uniform_layout
from kvgrpc.errors import InvalidRequest, OutOfRange, PreconditionFailed, Reason
from tests.core.nodes import full, hybrid, ids, refused


def test_runs_are_expanded_in_order() -> None:
    assert expand_runs([5, 0], [3, 2], 100).tolist() == [5, 6, 7, 0, 1]
    assert expand_runs([], [], 100).tolist() == []


@given(st.lists(st.integers(0, 50), max_size=30))
def test_runs_are_maximal_and_expand_to_the_ids_that_they_came_from(blocks: list[int]) -> None:
    starts, counts = to_runs(ids(*blocks))
    assert expand_runs(starts, counts, 100).tolist() == blocks
    for (start, count), following in zip(zip(starts, counts, strict=True), starts[1:], strict=False):
        assert start + count != following


def test_malformed_runs_are_refused() -> None:
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        expand_runs([1, 2], [1], 100)
    for count in (0, -1):
        with refused(Reason.INVALID_FIELD, InvalidRequest):
            expand_runs([1, 2], [1, count], 100)


def test_too_many_blocks_are_refused_before_anything_is_made() -> None:
    assert len(expand_runs([0], [100], 100)) == 100
    for counts in ([101], [2**32 - 1], [2**32 - 1] * 1000):
        with refused(Reason.LIMIT_EXCEEDED, OutOfRange):
            expand_runs([0] * len(counts), counts, 100)


def test_ids_lie_in_the_pool_and_none_is_listed_twice() -> None:
    check_ids(ids(), 4, "blocks")
    check_ids(ids(0, 1, 2, 3), 4, "blocks")
    check_ids(ids(3, 0, 2), 4, "blocks")
    for bad in ((4,), (0, -1), (0, 7, 1)):
        with refused(Reason.BLOCK_OUT_OF_RANGE, OutOfRange):
            check_ids(ids(*bad), 4, "blocks")
    for bad in ((1, 1), (0, 3, 0), (3, 2, 2)):
        with refused(Reason.BLOCK_DUPLICATE, InvalidRequest):
            check_ids(ids(*bad), 4, "blocks")


def test_the_size_of_a_pool_costs_nothing() -> None:
    """A peer states how many blocks it has: whatever it says, checking two ids takes no table of that size."""
    check_ids(ids(2**40, 5), 2**41, "blocks")
    with refused(Reason.BLOCK_DUPLICATE):
        check_ids(ids(2**40, 5, 2**40), 2**41, "blocks")


def bytes_of(layout: PoolLayout, group: int, block: int) -> list[int]:
    """The bytes of one block of a group, region by region."""
    return [
        region.offset + block * region.stride_bytes + i
        for region in layout.regions
        if region.group == group
        for i in range(region.block_bytes)
    ]


def wide(blocks: int, gap: int) -> PoolLayout:
    """As `hybrid`, but the blocks of both groups stand side by side, `gap` bytes apart."""
    groups = hybrid(blocks=blocks).groups
    stride = 16 + gap
    return PoolLayout(groups, (Region(0, 0, 1, 0, stride, 8), Region(1, 0, 1, 8, stride, 8)), blocks * stride)


BLOCKS = st.lists(st.integers(0, 19), unique=True, max_size=12)


@given(BLOCKS, BLOCKS, BLOCKS, BLOCKS, st.sampled_from([0, 3]))
def test_every_listed_block_is_copied_exactly_once_and_no_byte_outside(
    src_fine: list[int], dst_fine: list[int], src_other: list[int], dst_other: list[int], gap: int
) -> None:
    source, destination = hybrid(blocks=20), wide(20, gap)
    fine, other = min(len(src_fine), len(dst_fine)), min(len(src_other), len(dst_other))
    sources = (src_fine[:fine], src_other[:other])
    targets = (dst_fine[:fine], dst_other[:other])
    runs = plan_runs(source, destination, [ids(*b) for b in sources], [ids(*b) for b in targets])
    copied = [
        (src + i, dst + i)
        for src, dst, count in zip(runs.src.tolist(), runs.dst.tolist(), runs.nbytes.tolist(), strict=True)
        for i in range(count)
    ]
    expected = [
        pair
        for group in (0, 1)
        for a, b in zip(sources[group], targets[group], strict=True)
        for pair in zip(bytes_of(source, group, a), bytes_of(destination, group, b), strict=True)
    ]
    assert sorted(copied) == sorted(expected)
    assert runs.total_bytes == len(expected)


@given(BLOCKS, BLOCKS)
def test_no_two_runs_could_be_one(src: list[int], dst: list[int]) -> None:
    count = min(len(src), len(dst))
    layout = full(blocks=20, layers=1)
    runs = plan_runs(layout, layout, [ids(*src[:count])], [ids(*dst[:count])])
    for i in range(len(runs) - 1):
        adjacent = runs.src[i] + runs.nbytes[i] == runs.src[i + 1] and runs.dst[i] + runs.nbytes[i] == runs.dst[i + 1]
        assert not adjacent


def test_consecutive_blocks_on_both_sides_are_one_run_for_each_region() -> None:
    layout = full(blocks=20, layers=2)
    assert len(plan_runs(layout, layout, [ids(1, 2, 3)], [ids(7, 8, 9)])) == 2
    assert len(plan_runs(layout, layout, [ids(1, 2, 3)], [ids(9, 8, 7)])) == 6


def test_a_range_of_layers_moves_only_those() -> None:
    layout = full(blocks=20, layers=4)
    runs = plan_runs(layout, layout, [ids(5)], [ids(6)], layers=(1, 2))
    assert runs.src.tolist() == [layout.regions[1].offset + 40, layout.regions[2].offset + 40]
    assert len(plan_runs(layout, layout, [ids(5)], [ids(6)], layers=(4, 1))) == 0
    assert plan_runs(layout, layout, [ids(5)], [ids(6)], layers=(4, 1)).total_bytes == 0


def test_lists_that_do_not_fit_each_other_are_refused() -> None:
    layout = full(blocks=20)
    with refused(Reason.GROUP_MISMATCH, PreconditionFailed):
        plan_runs(layout, layout, [ids(1), ids(1)], [ids(1)])
    with refused(Reason.GROUP_MISMATCH, PreconditionFailed):
        plan_runs(layout, layout, [ids(1)], [])
    with refused(Reason.BLOCK_COUNT_MISMATCH, PreconditionFailed):
        plan_runs(layout, layout, [ids(1, 2)], [ids(1)])


def test_an_id_out_of_range_never_becomes_the_next_layer() -> None:
    layout = full(blocks=20)
    for source, destination in ((ids(20), ids(1)), (ids(1), ids(20)), (ids(-1), ids(1))):
        with refused(Reason.BLOCK_OUT_OF_RANGE, OutOfRange):
            plan_runs(layout, layout, [source], [destination])


def test_pools_of_different_sizes_each_have_their_own_bounds() -> None:
    small, large = full(blocks=4), full(blocks=40)
    assert plan_runs(large, small, [ids(39)], [ids(3)]).total_bytes == 16
    with refused(Reason.BLOCK_OUT_OF_RANGE):
        plan_runs(small, large, [ids(39)], [ids(3)])


@pytest.mark.parametrize("order", ["runs", "scattered"])
def test_65536_blocks_take_milliseconds(order: str) -> None:
    """Generous bounds: the point is milliseconds, not seconds, on a busy machine."""
    count, layers = 65_536, 1
    layout = uniform_layout(Group("g", GroupKind.MLA, layers, 16, count, 1, 1, "uint8"), 64)
    blocks = np.arange(count)
    if order == "scattered":
        blocks = np.random.default_rng(0).permutation(count)
    best = min(_time(layout, blocks) for _ in range(5))
    assert best < 0.05


def _time(layout: PoolLayout, blocks: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> float:
    start = time.perf_counter()
    runs = plan_runs(layout, layout, [blocks], [blocks])
    took = time.perf_counter() - start
    assert runs.total_bytes == layout.total_bytes
    return took
