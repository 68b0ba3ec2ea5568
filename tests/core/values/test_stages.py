"""Pipeline stages: ranks that have some of the layers, on one side, on both, or on neither."""

from dataclasses import replace

import pytest

from kvgrpc.core import events
from kvgrpc.core.values.bridge import Bridge, BridgeSide, common_stages
from kvgrpc.core.values.compatibility import CHECKSUMS, check_compatible, compare
from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout, Region, TensorKind, uniform_layout
from kvgrpc.core.values.obstacles import ROWS_MAX
from kvgrpc.errors import InvalidRequest, PreconditionFailed, Reason
from tests.core.nodes import Lead, describe, refused

GROUP = Group("g", GroupKind.FULL_ATTENTION, 4, 16, 4, 2, 4, "float16", "head_major", total_kv_heads=2)
BLOCK_BYTES = 2 * 2 * 16 * 4 * 2
ONE = uniform_layout(GROUP, BLOCK_BYTES)


def staged(*stages: int, group: Group = GROUP, block_bytes: int = BLOCK_BYTES) -> PoolLayout:
    """Makes a pool whose layers are in these stages, each stage from the first byte of its ranks' memory on."""
    regions, ends = [], [0] * (max(stages) + 1)
    for layer, stage in enumerate(stages):
        regions.append(Region(0, layer, 1, ends[stage], block_bytes, block_bytes, stage=stage))
        ends[stage] += group.blocks * block_bytes
    return PoolLayout((group,), tuple(regions), max(ends))


def test_layers_of_two_stages_may_lie_at_the_same_place_of_their_ranks_memory() -> None:
    pool = staged(0, 0, 0, 1)
    assert pool.stages == 2
    assert pool.stage_bytes == (3 * 4 * BLOCK_BYTES, 4 * BLOCK_BYTES)
    assert pool.stage_spans(0) == [(0, 3, 0), (3, 4, 1)]
    assert [pool.stage_layers(stage) for stage in range(2)] == [[0, 1, 2], [3]]


def test_layers_of_one_stage_may_not() -> None:
    regions = tuple(replace(region, offset=0) for region in ONE.regions)
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        PoolLayout((GROUP,), regions, ONE.total_bytes)


@pytest.mark.parametrize("stages", [(0, 0, 2, 2), (1, 1, 1, 1), (0, 0, 0, -1), (0, 1, 2, 1 << 31)])
def test_stages_are_numbered_from_0_without_a_gap(stages: tuple[int, ...]) -> None:
    regions = tuple(replace(region, stage=stage) for region, stage in zip(ONE.regions, stages, strict=True))
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        PoolLayout((GROUP,), regions, ONE.total_bytes)


def test_a_layer_is_in_one_stage() -> None:
    half = BLOCK_BYTES // 2
    apart = tuple(
        Region(0, 0, 4, 0, 4 * half, 4 * half, tensor, stage=stage)
        for stage, tensor in enumerate((TensorKind.K, TensorKind.V))
    )
    with pytest.raises(InvalidRequest) as error:
        PoolLayout((GROUP,), apart, 16 * BLOCK_BYTES)
    assert [violation.field for violation in error.value.violations] == ["groups[0].layers"]


@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_stages_have_as_many_ranks_each(ranks: int) -> None:
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        describe(pool=staged(0, 0, 1, 1), world_size=ranks)


def test_ranks_of_a_stage_share_the_heads_of_its_layers() -> None:
    halves = staged(0, 0, 1, 1, group=replace(GROUP, kv_heads=1), block_bytes=BLOCK_BYTES // 2)
    assert describe(pool=halves, world_size=4).stage_ranks == 2
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        describe(pool=staged(0, 0, 1, 1), world_size=4)


def test_stages_without_a_layer_in_common_exchange_nothing() -> None:
    two, three = staged(0, 0, 1, 1), staged(0, 1, 1, 2)
    assert common_stages(two, three, 0) == [(0, 0), (0, 1), (1, 1), (1, 2)]
    pairs = Bridge(BridgeSide(two, 2), BridgeSide(three, 3)).pairs
    assert [tuple(pair) for pair in pairs] == [(0, 0), (1, 0), (1, 1), (2, 1)]


def test_how_layers_are_staged_is_told_and_bridged() -> None:
    here, there = describe("a", pool=staged(0, 0, 1, 1), world_size=2), describe("b", pool=ONE)
    (found,) = compare(here, there)
    assert (found.field, found.here, found.there, found.bridgeable) == ("world_size", "2 stages of 1", "1", True)
    check_compatible(here, there)
    assert not compare(here, replace(here, engine_id="c"))
    assert here.pool.fingerprint() != there.pool.fingerprint()


def test_blocks_of_which_nothing_is_known_move_between_other_stages_too() -> None:
    group = replace(GROUP, dtype="of its own")
    here = describe("a", pool=staged(0, 0, 1, 1, group=group), world_size=2)
    there = describe("b", pool=uniform_layout(group, BLOCK_BYTES))
    check_compatible(here, there)
    halves = describe("c", pool=uniform_layout(replace(group, kv_heads=1), BLOCK_BYTES // 2), world_size=2)
    with refused(Reason.INCOMPATIBLE_POOLS, PreconditionFailed):
        check_compatible(here, halves)


def test_checksums_take_one_stage() -> None:
    here = describe("a", pool=staged(0, 0, 1, 1), world_size=2, features=(CHECKSUMS,), required_features=(CHECKSUMS,))
    with refused(Reason.PROTOCOL_UNSUPPORTED, PreconditionFailed):
        check_compatible(here, replace(here, engine_id="b"))


def test_a_peer_with_more_pairs_of_ranks_than_can_be_planned_is_refused_before_they_are_listed() -> None:
    names = [replace(GROUP, name=str(i), kv_heads=1, total_kv_heads=1) for i in range(40)]
    block_bytes, size = BLOCK_BYTES // 2, 4 * BLOCK_BYTES // 2
    regions = [Region(i, 0, 4, 4 * size * i, 4 * block_bytes, 4 * block_bytes) for i in range(40)]
    pool = PoolLayout(tuple(names), tuple(regions), 4 * size * 40)
    here, there = describe("a", pool=pool, world_size=1), describe("b", pool=pool, world_size=4096)
    assert ROWS_MAX < 40 * 4097
    (found,) = [difference for difference in compare(here, there) if not difference.bridgeable]
    assert (found.field, found.there) == ("world_size", "4096")


def test_layers_are_done_when_the_ranks_that_have_them_say_so() -> None:
    lead = Lead(describe("p", pool=staged(0, 0, 1, 1), world_size=2))
    lead.feed(events.StepDone(0, 5, layers=(0, 2)))
    assert [lead.state.pool.steps.done(layers) for layers in ((0, 2), (1, 2), (2, 2), None)] == [5, 0, 0, 0]
    lead.feed(events.StepDone(1, 5, layers=(2, 1)))
    assert [lead.state.pool.steps.done(layers) for layers in ((0, 3), (2, 2))] == [5, 0]
    lead.feed(events.StepDone(1, 6))
    assert [lead.state.pool.steps.done(layers) for layers in ((0, 4), (2, 2), None)] == [5, 6, 5]
