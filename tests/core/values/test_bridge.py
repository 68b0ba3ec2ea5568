"""Bridges between engines that split and lay out the same KV in different ways, checked byte by byte."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from kvgrpc.core.values.bridge import Bridge, BridgeSide, bridges
from kvgrpc.core.values.chunks import Chunk, Size
from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout, Region, TensorKind, uniform_layout
from kvgrpc.core.values.obstacles import differences
from kvgrpc.core.values.plans import PairRuns
from kvgrpc.core.values.slices import batches, slices_of, split
from kvgrpc.errors import InvalidRequest, Reason
from tests.core.nodes import ids, refused
from tests.core.random_layouts import Move, moves
from tests.core.split_kv import move


@settings(max_examples=1000)
@given(moves(), st.sampled_from([1, 8, 64, 1024]))
def test_every_head_of_every_destination_rank_is_written_once_and_nothing_else(made: Move, run_bytes_min: int) -> None:
    assert all(row.bridgeable for row in differences(made.source.side, made.destination.side))
    bridge = made.bridge(run_bytes_min)
    made.fill()
    planned = bridge.plan([made.chunk])
    move(planned, made.source, made.destination)
    made.check()
    assert sum(some.total_bytes for some in planned) == bridge.bytes_of([made.chunk])
    if made.tokens:
        begins = [bridge.begins(i, made.tokens, len(some.blocks)) for i, some in enumerate(made.taken)]
        assert tuple(begins) == made.chunk.begins


@settings(max_examples=500)
@given(moves(), st.data(), st.integers(1, 400), st.sampled_from([1, 64, 1024]))
def test_what_is_posted_in_parts_and_split_is_the_same_in_all(
    made: Move, data: st.DataObject, most: int, run_bytes_min: int
) -> None:
    bridge = made.bridge(run_bytes_min)
    made.fill()
    size = Size(most, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 64)))
    posted: list[PairRuns] = []
    for parts in batches(slices_of([made.chunk], bridge, size), bridge, size):
        left = tuple(bridge.plan(parts))
        while left:
            now, left = split(left, most)
            assert now
            posted += now
    move(posted, made.source, made.destination)
    made.check()


def apart(made: Move) -> list[tuple[int, int]]:
    """Returns ranges of layers, as (first, count), that cut no region of the source."""
    regions = made.source.side.pool.regions
    ends = sorted({region.first_layer + region.layers for region in regions})
    whole = [end for end in ends if not any(r.first_layer < end < r.first_layer + r.layers for r in regions)]
    return [(first, end - first) for first, end in pairwise([0, *whole])]


@settings(max_examples=500)
@given(moves())
def test_layers_one_after_the_other_are_all_layers(made: Move) -> None:
    bridge = made.bridge(1)
    made.fill()
    whole = made.chunk
    chunks = [replace(whole, layers=layers) for layers in apart(made)]
    move(bridge.plan(chunks), made.source, made.destination)
    made.check()
    parts = [bridge.size_of([chunk]).nbytes for chunk in chunks]
    assert sum(parts) >= bridge.size_of([whole]).nbytes >= max(parts)
    if made.destination.side.pool.stages == 1:
        assert sum(parts) == bridge.size_of([whole]).nbytes
    assert sum(bridge.bytes_of([chunk]) for chunk in chunks) == bridge.bytes_of([whole])


def side(ranks: int, total: int = 4, *, tokens: int = 16, kind: GroupKind = GroupKind.FULL_ATTENTION) -> BridgeSide:
    heads = 1 if kind is GroupKind.MLA else max(total // ranks, 1)
    latent = kind is GroupKind.MLA
    group = Group("g", kind, 2, tokens, 8, heads, 64, "uint8", total_kv_heads=0 if latent else total)
    return BridgeSide(uniform_layout(group, (1 if latent else 2) * tokens * heads * 64), ranks)


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
    source: BridgeSide, destination: BridgeSide, pairs: list[tuple[int, int]]
) -> None:
    assert list(map(tuple, Bridge(source, destination).pairs)) == pairs


def test_ranks_meet_for_what_moves_either_way() -> None:
    assert bridges(side(1, kind=GroupKind.MLA), side(2, kind=GroupKind.MLA)).pairs == ((0, 0), (0, 1))
    assert bridges(side(2, 4), side(4, 4)).pairs == ((0, 0), (0, 1), (1, 2), (1, 3))


def test_whole_blocks_move_where_both_sides_are_alike_however_small_they_are() -> None:
    tiny = BridgeSide(uniform_layout(Group("g", GroupKind.FULL_ATTENTION, 2, 16, 8, 1, 1, "uint8"), 8), 1)
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
    source = PoolLayout((group,), tuple(rows), 2048)
    destination = PoolLayout((group,), tuple(rows[i] for i in listed), 2048)
    (planned,) = Bridge(BridgeSide(source, 1), BridgeSide(destination, 1)).plan([Chunk((ids(1),), (ids(2),), None)])
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
    here, there = (BridgeSide(PoolLayout((some,), regions, 512), 1) for some in (group, wide))
    bridge = Bridge(here, there)
    (planned,) = bridge.plan([Chunk((ids(3),), (ids(5),), None, (bridge.begins(0, 40, 1),))])
    assert [planned.runs.src.tolist(), planned.runs.dst.tolist(), planned.runs.nbytes.tolist()] == [[192], [320], [64]]


def test_lists_that_begin_together_are_of_as_many_tokens() -> None:
    bridge = Bridge(side(1, tokens=32), side(1))
    assert bridge.plan([Chunk((ids(3),), (ids(4, 5),), None)])
    with refused(Reason.BLOCK_COUNT_MISMATCH, InvalidRequest):
        bridge.plan([Chunk((ids(3),), (ids(4),), None)])
