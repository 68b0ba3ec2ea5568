"""Bridges between engines that split and lay out the same KV in different ways, on bytes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kvgrpc.core.values.bridge import Bridge, Side, bridges
from kvgrpc.core.values.chunks import Chunk, Size
from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout, Region, Strides, TensorKind, uniform_layout
from kvgrpc.core.values.plans import PairRuns
from kvgrpc.core.values.slices import batches, slices_of, split
from kvgrpc.errors import InvalidRequest, Reason
from tests.core.nodes import ids, refused
from tests.core.split_kv import SplitKV, move, packed

LAYERS, DIM, TOKENS = 3, 4, 24
LAYER_SETS = [[(0, 3)], [(0, 1), (1, 1), (2, 1)], [(0, 2), (2, 1)]]


@st.composite
def layouts(draw: st.DrawFn, kind: GroupKind, total: int, block_tokens: int) -> SplitKV:
    ranks, order = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from(["token_major", "head_major"]))
    layer_sets = draw(st.sampled_from(LAYER_SETS))
    in_stages = [draw(st.permutations(range(len(layer_sets)))), [0] * len(layer_sets), [0, 1, 0][: len(layer_sets)]]
    stage_of = draw(st.sampled_from(in_stages))
    latent = kind is GroupKind.MLA
    heads, blocks = 1 if latent else max(total // ranks, 1), draw(st.integers(-(-TOKENS // block_tokens), 30))
    group = Group(
        "g", kind, LAYERS, block_tokens, blocks, heads, DIM, "uint8", order, total_kv_heads=0 if latent else total
    )
    kinds = [[TensorKind.LATENT]] if latent else [[TensorKind.KV], [TensorKind.K, TensorKind.V]]
    regions, ends = [], [0] * (max(stage_of) + 1)
    for stage, (first, layers) in zip(stage_of, layer_sets, strict=True):
        for tensor in draw(st.sampled_from(kinds)):
            parts, gap = 2 if tensor is TensorKind.KV else 1, draw(st.sampled_from([0, 5]))
            nbytes = packed(group, parts).layer * layers
            # Keys and values of a token side by side, as some engines have them.
            run = parts * DIM
            own = draw(st.sampled_from([None, Strides(heads * block_tokens * run, DIM, block_tokens * run, run)]))
            regions.append(Region(0, first, layers, ends[stage], nbytes + gap, nbytes, tensor, own, stage))
            ends[stage] += blocks * (nbytes + gap) + 3
    return SplitKV(Side(PoolLayout((group,), tuple(regions), max(ends)), len(ends) * ranks))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[SplitKV, SplitKV]:
    kind = draw(st.sampled_from([GroupKind.FULL_ATTENTION, GroupKind.FULL_ATTENTION, GroupKind.MLA]))
    total, sizes = (
        draw(st.sampled_from([1, 2, 4, 8])),
        draw(st.sampled_from([(4, 4), (4, 8), (8, 4), (12, 4), (4, 12)])),
    )
    return draw(layouts(kind, total, sizes[0])), draw(layouts(kind, total, sizes[1]))


@st.composite
def lists(draw: st.DrawFn, side: SplitKV) -> tuple[list[int], int]:
    """Blocks in token order, and the token with which they begin."""
    tokens, blocks = side.group.block_tokens, side.group.blocks
    begin = draw(st.integers(0, 1)) * tokens
    count = draw(st.integers(1, min(blocks, -(-(TOKENS - begin) // tokens))))
    return draw(st.permutations(range(blocks)))[:count], begin


@settings(max_examples=400, deadline=None)
@given(pairs(), st.data(), st.sampled_from([1, 8, 1024]))
def test_every_head_of_every_destination_rank_is_written_once_and_nothing_else(
    both: tuple[SplitKV, SplitKV], data: st.DataObject, run_bytes_min: int
) -> None:
    source, destination = both
    bridge = Bridge(source.side, destination.side, run_bytes_min)
    (here, begin), (there, other) = data.draw(lists(source)), data.draw(lists(destination))
    source.fill(here, begin)
    chunk = Chunk((np.array(here),), (np.array(there),), None, ((begin, other),))
    planned = bridge.plan([chunk])
    move(planned, source, destination)
    destination.check(there, bridge.extent(chunk, 0), other)
    assert sum(some.total_bytes for some in planned) == bridge.bytes_of([chunk])


@settings(max_examples=200, deadline=None)
@given(pairs(), st.data(), st.integers(1, 400), st.sampled_from([1, 1024]))
def test_what_is_posted_in_parts_and_split_is_the_same_in_all(
    both: tuple[SplitKV, SplitKV], data: st.DataObject, most: int, run_bytes_min: int
) -> None:
    source, destination = both
    bridge = Bridge(source.side, destination.side, run_bytes_min)
    (here, begin), (there, other) = data.draw(lists(source)), data.draw(lists(destination))
    source.fill(here, begin)
    chunk = Chunk((np.array(here),), (np.array(there),), None, ((begin, other),))
    size = Size(most, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 64)))
    posted: list[PairRuns] = []
    for parts in batches(slices_of([chunk], bridge, size), bridge, size):
        left = tuple(bridge.plan(parts))
        while left:
            now, left = split(left, most)
            assert now
            posted += now
    move(posted, source, destination)
    destination.check(there, bridge.extent(chunk, 0), other)


@settings(max_examples=200, deadline=None)
@given(pairs(), st.data())
def test_layers_one_after_the_other_are_all_layers(both: tuple[SplitKV, SplitKV], data: st.DataObject) -> None:
    source, destination = both
    bridge = Bridge(source.side, destination.side, 1)
    (here, begin), (there, other) = data.draw(lists(source)), data.draw(lists(destination))
    source.fill(here, begin)
    ranges = sorted({(region.first_layer, region.layers) for region in source.side.pool.regions})
    chunks = [Chunk((np.array(here),), (np.array(there),), layers, ((begin, other),)) for layers in ranges]
    move(bridge.plan(chunks), source, destination)
    destination.check(there, bridge.extent(chunks[0], 0), other)
    parts, whole = [bridge.size_of([chunk]).nbytes for chunk in chunks], replace(chunks[0], layers=None)
    assert sum(parts) >= bridge.size_of([whole]).nbytes >= max(parts)
    if destination.side.pool.stages == 1:
        assert sum(parts) == bridge.size_of([whole]).nbytes
    assert sum(bridge.bytes_of([chunk]) for chunk in chunks) == bridge.bytes_of([whole])


def side(ranks: int, total: int = 4, *, tokens: int = 16, kind: GroupKind = GroupKind.FULL_ATTENTION) -> Side:
    heads = 1 if kind is GroupKind.MLA else max(total // ranks, 1)
    latent = kind is GroupKind.MLA
    group = Group("g", kind, 2, tokens, 8, heads, 64, "uint8", total_kv_heads=0 if latent else total)
    return Side(uniform_layout(group, (1 if latent else 2) * tokens * heads * 64), ranks)


@pytest.mark.parametrize(
    ("source", "destination", "pairs"),
    [
        (side(2), side(2), [(0, 0), (1, 1)]),
        (side(1), side(2), [(0, 0), (1, 0)]),
        (side(4), side(2), [(0, 0), (0, 1), (1, 2), (1, 3)]),
        (side(4, 2), side(4, 2), [(0, 0), (1, 1), (2, 2), (3, 3)]),
        (side(4, 2), side(1, 2), [(0, 0), (0, 2)]),
        (side(1, 2), side(4, 2), [(0, 0), (1, 0), (2, 0), (3, 0)]),
        (side(2, kind=GroupKind.MLA), side(4, kind=GroupKind.MLA), [(0, 0), (1, 1), (2, 0), (3, 1)]),
        (side(4, kind=GroupKind.MLA), side(1, kind=GroupKind.MLA), [(0, 0)]),
    ],
)
def test_a_rank_reads_what_it_needs_once_and_ranks_that_have_the_same_share_the_work(
    source: Side, destination: Side, pairs: list[tuple[int, int]]
) -> None:
    assert list(map(tuple, Bridge(source, destination).pairs)) == pairs


def test_ranks_meet_for_what_moves_either_way() -> None:
    assert bridges(side(1, kind=GroupKind.MLA), side(2, kind=GroupKind.MLA)).pairs == ((0, 0), (0, 1))
    assert bridges(side(2, 4), side(4, 4)).pairs == ((0, 0), (0, 1), (1, 2), (1, 3))


def test_whole_blocks_move_where_both_sides_are_alike_however_small_they_are() -> None:
    tiny = Side(uniform_layout(Group("g", GroupKind.FULL_ATTENTION, 2, 16, 8, 1, 1, "uint8"), 8), 1)
    bridge = Bridge(tiny, tiny)
    assert not bridge.repacked
    assert not bridge.cuts_blocks(0)
    (planned,) = bridge.plan([Chunk((ids(1, 2),), (ids(4, 5),), None)])
    assert planned.runs.nbytes.tolist() == [16, 16]


@pytest.mark.parametrize("listed", [(0, 1, 2, 3), (3, 1, 2, 0)], ids=["in order", "in another order"])
def test_blocks_of_which_nothing_is_known_come_from_the_same_layer_and_tensor(listed: tuple[int, ...]) -> None:
    group = Group("g", GroupKind.FULL_ATTENTION, 2, 16, 8, 1, 64, "of its own")
    tensors = [(layer, tensor) for layer in range(2) for tensor in (TensorKind.K, TensorKind.V)]
    rows = [Region(0, layer, 1, 512 * i, 64, 64, tensor) for i, (layer, tensor) in enumerate(tensors)]
    source, destination = PoolLayout((group,), tuple(rows), 2048), PoolLayout(
        (group,), tuple(rows[i] for i in listed), 2048
    )  # fmt: skip
    (planned,) = Bridge(Side(source, 1), Side(destination, 1)).plan([Chunk((ids(1),), (ids(2),), None)])
    runs = sorted(zip(planned.runs.src.tolist(), planned.runs.dst.tolist(), strict=True))
    assert runs == [(512 * i + 64, 512 * i + 128) for i in range(4)]


def test_short_runs_are_read_as_whole_blocks_each_once_and_copied_from_there() -> None:
    bridge = Bridge(side(1, tokens=32), side(2))
    assert bridge.repacked == {0}
    assert bridge.run_bytes(0) == 2 * 64
    (first, second) = bridge.plan([Chunk((ids(3),), (ids(4, 5),), None)])
    assert first.repack is not None
    assert first.repack.staging_bytes == first.runs.total_bytes == 2 * 2 * 32 * 4 * 64
    assert first.total_bytes == second.total_bytes == first.runs.total_bytes // 2
    assert split([first, second], 1) == ((first, second), ())


def test_a_state_is_one_block_whatever_its_block_is_said_to_hold() -> None:
    group = Group("s", GroupKind.STATE, 1, 16, 8, 1, 1, "uint8")
    wide = replace(group, block_tokens=2048)
    regions = (Region(0, 0, 1, 0, 64, 64, TensorKind.STATE),)
    here, there = (Side(PoolLayout((some,), regions, 512), 1) for some in (group, wide))
    bridge = Bridge(here, there)
    (planned,) = bridge.plan([Chunk((ids(3),), (ids(5),), None, (bridge.begins(0, 40, 1),))])
    assert [planned.runs.src.tolist(), planned.runs.dst.tolist(), planned.runs.nbytes.tolist()] == [[192], [320], [64]]


def test_lists_that_begin_together_are_of_as_many_tokens() -> None:
    bridge = Bridge(side(1, tokens=32), side(1))
    assert bridge.plan([Chunk((ids(3),), (ids(4, 5),), None)])
    with refused(Reason.BLOCK_COUNT_MISMATCH, InvalidRequest):
        bridge.plan([Chunk((ids(3),), (ids(4),), None)])
