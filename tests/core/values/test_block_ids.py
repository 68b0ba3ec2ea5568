"""Block ids become byte runs: every listed block is copied exactly once, and no other byte is touched."""

import timeit
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvgrpc.core.values.block_ids import check_ids, expand_runs, to_runs
from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout, Region, uniform_layout
from kvgrpc.errors import InvalidRequest, OutOfRange, Reason
from tests.core.nodes import full, hybrid, ids, refused
from tests.core.values.planned import plan_runs


def test_runs_are_expanded_in_order() -> None:
    assert expand_runs([5, 0], [3, 2], 100).tolist() == [5, 6, 7, 0, 1]
    assert expand_runs([], [], 100).tolist() == []


@given(st.lists(st.integers(0, 50), max_size=30))
def test_runs_are_maximal_and_expand_to_the_ids_that_they_came_from(blocks: list[int]) -> None:
    starts, counts = to_runs(ids(*blocks))
    assert expand_runs(starts, counts, 100).tolist() == blocks
    for (start, count), following in zip(zip(starts, counts, strict=True), starts[1:], strict=False):
        assert start + count != following


@pytest.mark.parametrize("step", [1, 2])
def test_runs_of_many_ids_are_those_of_few(step: int) -> None:
    many = [*range(0, 100, step), *range(200, 300)]
    assert to_runs(ids(*many)) == to_runs(many)
    assert to_runs(ids(*range(200, 300))) == ([200], [100])


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


@pytest.mark.parametrize(("starts", "counts"), [([0], [2**32 - 1]), ([0, 7], [2**32 - 1, 2**32 - 1]), ([5], [65_537])])
def test_runs_that_are_refused_cost_no_memory(starts: list[int], counts: list[int]) -> None:
    tracemalloc.start()
    try:
        with refused(Reason.LIMIT_EXCEEDED, OutOfRange):
            expand_runs(starts, counts, 65_536)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_the_largest_ids_of_the_wire_are_expanded_unchanged() -> None:
    assert expand_runs([2**32 - 1, 2**32 - 2], [1, 2], 3).tolist() == [2**32 - 1, 2**32 - 2, 2**32 - 1]


def test_ids_lie_in_the_pool_and_none_is_listed_twice() -> None:
    check_ids(ids(), 4, "blocks")
    check_ids(ids(0, 1, 2, 3), 4, "blocks")
    check_ids(ids(3, 0, 2), 4, "blocks")
    for bad, named in (((4,), 4), ((0, -1), -1), ((0, 7, 1), 7)):
        with pytest.raises(OutOfRange, match=f"blocks: block {named} does not exist; ids run from 0 to 3") as caught:
            check_ids(ids(*bad), 4, "blocks")
        assert caught.value.reason is Reason.BLOCK_OUT_OF_RANGE
    for bad in ((1, 1), (0, 3, 0), (3, 2, 2)):
        with refused(Reason.BLOCK_DUPLICATE, InvalidRequest):
            check_ids(ids(*bad), 4, "blocks")


def test_the_size_of_a_pool_costs_nothing() -> None:
    """A peer states its number of blocks; checking two ids never allocates a table of that size."""
    check_ids(ids(2**40, 5), 2**41, "blocks")
    with refused(Reason.BLOCK_DUPLICATE):
        check_ids(ids(2**40, 5, 2**40), 2**41, "blocks")


def bytes_of(layout: PoolLayout, group: int, block: int) -> list[int]:
    """Returns the bytes of one block of a group, region by region."""
    return [
        region.offset + block * region.stride_bytes + i
        for region in layout.regions
        if region.group == group
        for i in range(region.block_bytes)
    ]


def wide(blocks: int, gap: int) -> PoolLayout:
    """Makes the groups of `hybrid` with the blocks of both groups side by side, and a gap of `gap` bytes."""
    groups = hybrid(blocks=blocks).groups
    stride = 16 + gap
    return PoolLayout(groups, (Region(0, 0, 1, 0, stride, 8), Region(1, 0, 1, 8, stride, 8)), blocks * stride)


BLOCKS = st.lists(st.integers(0, 19), unique=True, max_size=12)


COPIES = st.tuples(BLOCKS, BLOCKS).map(lambda lists: [*zip(*lists, strict=False)])
Copies = list[tuple[int, int]]
"""Copies of one group: (block at the source, block at the destination)."""


@given(COPIES, COPIES, st.sampled_from([0, 3]))
def test_every_listed_block_is_copied_once_and_no_byte_outside(fine: Copies, other: Copies, gap: int) -> None:
    source, destination = hybrid(blocks=20), wide(20, gap)
    sources = [[here for here, _ in group] for group in (fine, other)]
    targets = [[there for _, there in group] for group in (fine, other)]
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


@st.composite
def pairs_of_layouts(draw: st.DrawFn) -> tuple[PoolLayout, PoolLayout]:
    """Draws two pools of the same groups and regions, each with its own sizes, offsets and strides."""
    shapes = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=3))
    packed = [draw(st.sampled_from([n for n in range(1, layers + 1) if layers % n == 0])) for layers, _ in shapes]

    def pool() -> PoolLayout:
        groups: list[Group] = []
        regions: list[Region] = []
        at = 0
        for i, ((layers, nbytes), each) in enumerate(zip(shapes, packed, strict=True)):
            group = Group(f"g{i}", GroupKind.FULL_ATTENTION, layers, 16, draw(st.integers(5, 9)), 1, 1, "uint8")
            block, gap, rows = nbytes * each, draw(st.integers(0, 3)), draw(st.booleans())
            count = layers // each
            stride, step = (count * (block + gap), block + gap) if rows else (block + gap, group.blocks * (block + gap))
            regions += [Region(i, j * each, each, at + j * step, stride, block) for j in range(count)]
            groups.append(group)
            at += group.blocks * count * (block + gap)
        return PoolLayout(tuple(groups), tuple(regions), at)

    return pool(), pool()


@given(pairs_of_layouts(), st.data())
def test_a_copy_fills_the_listed_blocks_and_no_other_byte(
    layouts: tuple[PoolLayout, PoolLayout], data: st.DataObject
) -> None:
    source, destination = layouts
    lists = st.lists(st.integers(0, 4), unique=True)
    sources = [data.draw(lists) for _ in source.groups]
    targets = [data.draw(st.permutations(range(5)))[: len(blocks)] for blocks in sources]
    runs = plan_runs(source, destination, [ids(*b) for b in sources], [ids(*b) for b in targets])

    before = np.arange(1, source.total_bytes + 1)
    after = np.zeros(destination.total_bytes, dtype=np.int64)
    written = np.zeros(destination.total_bytes, dtype=np.int64)
    for src, dst, nbytes in zip(runs.src.tolist(), runs.dst.tolist(), runs.nbytes.tolist(), strict=True):
        assert src >= 0
        assert src + nbytes <= source.total_bytes
        after[dst : dst + nbytes] = before[src : src + nbytes]
        written[dst : dst + nbytes] += 1

    expected = np.zeros(destination.total_bytes, dtype=np.int64)
    for group, (src_blocks, dst_blocks) in enumerate(zip(sources, targets, strict=True)):
        for a, b in zip(src_blocks, dst_blocks, strict=True):
            expected[bytes_of(destination, group, b)] = before[bytes_of(source, group, a)]
    assert (after == expected).all()
    assert (written == (expected > 0)).all()


@given(BLOCKS, BLOCKS)
def test_runs_come_by_region_in_the_order_of_the_lists_and_join_only_neighbours(src: list[int], dst: list[int]) -> None:
    layout = full(blocks=20, layers=2)
    pairs = list(zip(src, dst, strict=False))
    runs = plan_runs(layout, layout, [ids(*(a for a, _ in pairs))], [ids(*(b for _, b in pairs))])
    expected: list[list[int]] = []
    for region in layout.regions:
        for i, (a, b) in enumerate(pairs):
            if i and (a, b) == (pairs[i - 1][0] + 1, pairs[i - 1][1] + 1):
                expected[-1][2] += 8
            else:
                expected.append([region.offset + 8 * a, region.offset + 8 * b, 8])
    assert np.stack([runs.src, runs.dst, runs.nbytes], axis=1).tolist() == expected
    assert len(runs) == len(expected)


def test_neighbours_in_a_list_whose_bytes_are_apart_are_not_joined() -> None:
    dense, apart = hybrid(blocks=20), wide(20, 0)
    assert len(plan_runs(dense, dense, [ids(1, 2), ids()], [ids(1, 2), ids()])) == 1
    assert len(plan_runs(dense, apart, [ids(1, 2), ids()], [ids(1, 2), ids()])) == 2
    assert len(plan_runs(apart, dense, [ids(1, 2), ids()], [ids(1, 2), ids()])) == 2


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


@pytest.mark.parametrize("layers", [(0, 1), (1, 1), (1, 2), (1, 3), (0, 3), (3, 9)])
def test_a_range_of_layers_that_cuts_a_region_is_refused(layers: tuple[int, int]) -> None:
    group = Group("g", GroupKind.FULL_ATTENTION, 4, 16, 20, 1, 1, "uint8")
    layout = uniform_layout(group, 8, layers_per_region=2)
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        plan_runs(layout, layout, [ids(5)], [ids(6)], layers=layers)
    assert [len(plan_runs(layout, layout, [ids(5)], [ids(6)], layers=r)) for r in ((0, 2), (2, 2), (0, 4))] == [1, 1, 2]


def test_lists_that_do_not_fit_each_other_are_refused() -> None:
    layout = full(blocks=20)
    with refused(Reason.GROUP_MISMATCH, InvalidRequest):
        plan_runs(layout, layout, [ids(1), ids(1)], [ids(1)])
    with refused(Reason.GROUP_MISMATCH, InvalidRequest):
        plan_runs(layout, layout, [ids(1)], [])
    with refused(Reason.BLOCK_COUNT_MISMATCH, InvalidRequest):
        plan_runs(layout, layout, [ids(1, 2)], [ids(1)])


def test_a_block_that_is_listed_twice_is_refused_on_either_side() -> None:
    layout = full(blocks=20)
    for source, destination in ((ids(1, 1), ids(1, 2)), (ids(1, 2), ids(2, 2))):
        with refused(Reason.BLOCK_DUPLICATE, InvalidRequest):
            plan_runs(layout, layout, [source], [destination])


def test_every_group_is_checked_before_any_run_is_made() -> None:
    layout = hybrid(blocks=20)
    with refused(Reason.BLOCK_OUT_OF_RANGE, OutOfRange):
        plan_runs(layout, layout, [ids(1), ids(1)], [ids(1), ids(20)])
    with refused(Reason.BLOCK_COUNT_MISMATCH, InvalidRequest):
        plan_runs(layout, layout, [ids(1), ids()], [ids(1), ids(1)])


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
def test_65536_blocks_cost_a_few_passes_over_their_ids(order: str) -> None:
    """The limit is relative to numpy in the same run, and generous: it tells milliseconds from seconds."""
    count = 65_536
    layout = uniform_layout(Group("g", GroupKind.MLA, 1, 16, count, 1, 1, "uint8"), 64)
    blocks = np.arange(count) if order == "runs" else np.random.default_rng(0).permutation(count)

    def passes() -> None:
        for _ in range(10):
            np.diff(blocks * 64)
        np.sort(blocks)

    def plan() -> None:
        assert plan_runs(layout, layout, [blocks], [blocks]).total_bytes == layout.total_bytes

    assert min(timeit.repeat(plan, number=1, repeat=5)) < 20 * min(timeit.repeat(passes, number=1, repeat=5))
