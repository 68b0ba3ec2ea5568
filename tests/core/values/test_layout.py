"""Layouts: no two blocks share a byte, none leaves the memory, and each layer is somewhere once. A peer's layout costs
no more than its message.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvgrpc.core.values.layout import (
    BYTES_MAX,
    LAYERS_MAX,
    REGIONS_MAX,
    WHOLE,
    Group,
    GroupKind,
    PoolLayout,
    Region,
    TensorKind,
    uniform_layout,
)
from kvgrpc.errors import InvalidRequest, Reason
from tests.core.nodes import full, hybrid, refused
from tests.core.values.planned import plan_runs

GROUP = Group("g", GroupKind.FULL_ATTENTION, 2, 16, 4, 1, 1, "uint8")
TWO = (Region(0, 0, 1, 0, 8, 8), Region(0, 1, 1, 32, 8, 8))


def violations(*regions: Region, groups: tuple[Group, ...] = (GROUP,), total: int = 64) -> list[str]:
    """Returns the fields of a layout that are wrong."""
    try:
        PoolLayout(groups, regions, total)
    except InvalidRequest as error:
        return [violation.field for violation in error.violations]
    return []


def bytes_of(groups: tuple[Group, ...], regions: list[Region]) -> list[int]:
    """Returns every byte of every block; a byte that two blocks share is listed twice."""
    return [
        region.offset + block * region.stride_bytes + i
        for region in regions
        for block in range(groups[region.group].blocks)
        for i in range(region.block_bytes)
    ]


def test_what_is_wrong_with_a_layout_is_an_error_of_the_request() -> None:
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        PoolLayout((), (), 0)


def test_a_dense_layout_has_a_region_for_each_layer() -> None:
    layout = uniform_layout(GROUP, 8)
    assert layout == PoolLayout((GROUP,), TWO, 64)
    assert layout.block_bytes(0) == 16
    assert uniform_layout(GROUP, 8, layers_per_region=2).regions == (Region(0, 0, 2, 0, 16, 16),)
    six = uniform_layout(replace(GROUP, layers=6), 8, layers_per_region=2)
    assert [(region.first_layer, region.offset) for region in six.regions] == [(0, 0), (2, 64), (4, 128)]
    assert six.total_bytes == 192


def test_bytes_are_counted_over_all_layers_of_each_group() -> None:
    groups = (replace(GROUP, name="a"), replace(GROUP, name="b", layers=1))
    layout = PoolLayout(groups, (*TWO, Region(1, 0, 1, 64, 5, 5)), 84)
    assert [layout.block_bytes(group) for group in (0, 1)] == [16, 5]


def test_layers_may_stand_side_by_side_in_the_rows_of_one_array() -> None:
    assert violations(Region(0, 0, 1, 0, 16, 8), Region(0, 1, 1, 8, 16, 8)) == []
    # Regions may stand in any order, with a gap, and before another array.
    assert violations(Region(0, 1, 1, 8, 20, 8), Region(0, 0, 1, 0, 20, 8), total=80) == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Region(0, 0, 1, 0, 8, 8), Region(0, 1, 1, 31, 8, 8)),  # arrays share a byte
        (Region(0, 0, 1, 0, 16, 9), Region(0, 1, 1, 8, 16, 8)),  # neighbours in a row share a byte
        (Region(0, 0, 1, 0, 16, 8), Region(0, 1, 1, 9, 16, 8)),  # the row is too short for both
        (Region(0, 0, 1, 0, 16, 8), Region(0, 1, 1, 8, 17, 8)),  # the rows have different lengths
        (Region(0, 0, 1, 0, 8, 8), Region(0, 1, 1, 0, 8, 8)),  # the same bytes
    ],
)
def test_two_blocks_that_share_a_byte_are_refused(first: Region, second: Region) -> None:
    assert violations(first, second, total=200) == ["regions[1].offset"]


def test_an_overlap_is_found_behind_a_region_that_lies_between() -> None:
    groups = tuple(replace(GROUP, name=f"g{blocks}", layers=1, blocks=blocks) for blocks in (10, 2, 5))
    long, short, last = Region(0, 0, 1, 0, 16, 8), Region(1, 0, 1, 8, 16, 8), Region(2, 0, 1, 160, 8, 8)
    assert violations(long, short, last, groups=groups, total=500) == []
    assert violations(long, short, replace(last, offset=96), groups=groups, total=500) == ["regions[2].offset"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"group": 1}, "regions[1].group"),
        ({"group": -1}, "regions[1].group"),
        ({"layers": 0}, "regions[1]"),
        ({"block_bytes": 0}, "regions[1]"),
        ({"offset": -1}, "regions[1]"),
        ({"stride_bytes": 7}, "regions[1].stride_bytes"),
        ({"stride_bytes": BYTES_MAX + 1}, "regions[1].stride_bytes"),
        ({"offset": 33}, "regions[1]"),
        ({"first_layer": 0}, "groups[0].layers"),
        ({"first_layer": 2}, "groups[0].layers"),
        ({"first_layer": -1}, "groups[0].layers"),
        ({"layers": 2}, "groups[0].layers"),
        ({"layers": 2**32}, "groups[0].layers"),
        ({"tensor": TensorKind.LATENT}, "regions[1].tensor"),
        ({"tensor": TensorKind.STATE}, "regions[1].tensor"),
        ({"tensor": TensorKind.K}, "groups[0].layers"),
        ({"tensor": TensorKind.V}, "groups[0].layers"),
    ],
)
def test_each_wrong_field_of_a_region_is_named(change: dict[str, Any], field: str) -> None:
    assert field in violations(TWO[0], replace(TWO[1], **change))


def test_where_a_lone_block_would_be_followed_by_another_is_bounded_too() -> None:
    """The stride is multiplied with block ids even in a pool of one block."""
    lone = replace(GROUP, blocks=1)
    layouts = []
    for stride in (8, BYTES_MAX):
        regions = tuple(replace(region, stride_bytes=stride) for region in TWO)
        layouts.append(PoolLayout((lone,), regions, 64))
    block = (np.zeros(1, dtype=np.int64),)
    assert plan_runs(layouts[0], layouts[1], block, block).total_bytes == 16
    for stride in (BYTES_MAX + 1, 2**63, 2**64 - 1):
        assert "regions[1].stride_bytes" in violations(TWO[0], replace(TWO[1], stride_bytes=stride), groups=(lone,))


def apart(layer: int, offset: int) -> tuple[Region, Region]:
    """Makes regions of a layer's keys and values, each in an array of its own."""
    keys = Region(0, layer, 1, offset, 4, 4, TensorKind.K)
    return keys, replace(keys, offset=offset + 16, tensor=TensorKind.V)


def test_keys_and_values_may_have_regions_of_their_own_in_all_layers_or_some() -> None:
    assert violations(*apart(0, 0), *apart(1, 32)) == []
    assert violations(TWO[0], *apart(1, 32)) == []
    both = Region(0, 0, 2, 0, 8, 8, TensorKind.K)
    assert violations(both, replace(both, offset=32, tensor=TensorKind.V)) == []


@pytest.mark.parametrize("left_out", [0, 1, 2, 3])
def test_keys_and_values_of_each_layer_are_somewhere_once(left_out: int) -> None:
    regions = [*apart(0, 0), *apart(1, 32)]
    assert violations(*(r for i, r in enumerate(regions) if i != left_out)) == ["groups[0].layers"]
    again = replace(regions[left_out], offset=64)
    assert violations(*regions, again, total=80) == ["groups[0].layers"]
    assert violations(*regions, Region(0, 0, 1, 64, 8, 8), total=96) == ["groups[0].layers"]


@pytest.mark.parametrize("kind", GroupKind)
@pytest.mark.parametrize("tensor", TensorKind)
def test_a_region_holds_what_layers_of_its_group_have(kind: GroupKind, tensor: TensorKind) -> None:
    groups = (replace(GROUP, kind=kind, layers=1),)
    attention = kind in (GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW)
    foreign = ["regions[0].tensor"] if WHOLE[kind] is not tensor and not attention else []
    if attention and tensor in (TensorKind.LATENT, TensorKind.STATE):
        foreign = ["regions[0].tensor"]
    missing = [] if tensor is WHOLE[kind] else ["groups[0].layers"]
    assert violations(Region(0, 0, 1, 0, 8, 8, tensor), groups=groups) == foreign + missing


@pytest.mark.parametrize("field", ["layers", "block_tokens", "blocks", "kv_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -1])
def test_counts_of_a_group_are_positive(field: str, value: int) -> None:
    assert f"groups[0].{field}" in violations(*TWO, groups=(replace(GROUP, **{field: value}),))  # type: ignore[arg-type]


def test_a_pool_has_groups_of_different_names_and_a_known_order() -> None:
    assert "groups" in violations(groups=())
    assert "groups" in violations(*TWO, groups=(GROUP, replace(GROUP, layers=1)))
    assert violations(*TWO, groups=(replace(GROUP, order="diagonal"),)) == ["groups[0].order"]
    assert violations(*TWO, groups=(replace(GROUP, order="head_major"),)) == []


@pytest.mark.parametrize("total", [0, -1, BYTES_MAX + 1])
def test_the_size_of_the_memory_is_bounded(total: int) -> None:
    assert violations(*TWO, total=total) == ["total_bytes"]


def test_what_a_peer_says_is_bounded_before_it_is_looked_at() -> None:
    for layers, expected in ((LAYERS_MAX, []), (LAYERS_MAX + 1, ["groups[0].layers"])):
        packed = Region(0, 0, layers, 0, 8, 8)
        assert violations(packed, groups=(replace(GROUP, layers=layers),)) == expected
    every = tuple(Region(0, i, 1, i, REGIONS_MAX, 1) for i in range(REGIONS_MAX))
    assert violations(*every, groups=(replace(GROUP, layers=REGIONS_MAX),), total=BYTES_MAX) == []
    assert violations(*(TWO[0],) * (REGIONS_MAX + 1)) == ["regions"]
    many = [Region(0, i, 1, i, 1 << 20, 1) for i in range(20_000)]
    groups = (replace(GROUP, layers=20_000),)
    assert violations(*many, groups=groups, total=1 << 30) == []
    overlapping = violations(*[replace(r, offset=0) for r in many], groups=groups, total=1 << 30)
    assert overlapping[:2] == ["regions[1].offset", "regions[2].offset"]
    assert len(overlapping) < 100


def test_blocks_of_tokens_are_rounded_up_and_a_state_is_one_block() -> None:
    assert [GROUP.blocks_of(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
    state = replace(GROUP, kind=GroupKind.STATE)
    assert [state.blocks_of(tokens) for tokens in (0, 1, 16, 1000)] == [0, 1, 1, 1]


def test_a_window_is_the_blocks_that_its_tokens_lie_in() -> None:
    window = replace(GROUP, kind=GroupKind.SLIDING_WINDOW, window_tokens=20)
    assert [window.first_of(tokens) for tokens in (20, 35, 36, 51, 52)] == [0, 0, 1, 1, 2]
    assert [window.blocks_of(tokens) for tokens in (0, 20, 35, 36, 48, 51, 52)] == [0, 2, 3, 2, 2, 3, 2]
    assert [window.held_of(52, have) for have in (0, 32, 47, 48)] == [0, 0, 0, 1]
    assert replace(GROUP, kind=GroupKind.STATE, window_tokens=20).blocks_of(1000) == 1
    assert violations(*TWO, groups=(replace(GROUP, window_tokens=-1),)) == ["groups[0].window_tokens"]


@pytest.mark.parametrize(
    "change",
    [
        {"kind": GroupKind.MLA},
        {"layers": 4},
        {"block_tokens": 32},
        {"kv_heads": 2},
        {"head_dim": 2},
        {"dtype": "int8"},
        {"order": "head_major"},
        {"window_tokens": 128},
    ],
)
def test_the_fingerprint_changes_with_what_two_pools_must_share(change: dict[str, Any]) -> None:
    other = uniform_layout(replace(GROUP, **change), 8)
    assert other.fingerprint() != uniform_layout(GROUP, 8).fingerprint()


def test_the_fingerprint_leaves_out_what_each_pool_has_for_itself() -> None:
    layout = uniform_layout(GROUP, 8)
    shifted = tuple(replace(r, offset=r.offset + 100, stride_bytes=8) for r in layout.regions)
    assert PoolLayout((GROUP,), shifted, 200).fingerprint() == layout.fingerprint()
    assert len(layout.fingerprint()) == 32
    assert full(blocks=64).fingerprint() == full(blocks=8).fingerprint()
    assert full().fingerprint() != hybrid().fingerprint()


@pytest.mark.parametrize(
    "regions",
    [
        (Region(0, 0, 2, 0, 16, 16),),
        (Region(0, 0, 1, 0, 8, 8), Region(0, 1, 1, 32, 8, 7)),
        (Region(0, 1, 1, 0, 8, 8), Region(0, 0, 1, 32, 8, 8)),
        (TWO[0], Region(0, 1, 1, 32, 4, 4, TensorKind.K), Region(0, 1, 1, 48, 4, 4, TensorKind.V)),
    ],
    ids=["packed", "smaller blocks", "another order", "keys and values apart"],
)
def test_the_fingerprint_changes_with_how_layers_lie_in_regions(regions: tuple[Region, ...]) -> None:
    assert PoolLayout((GROUP,), regions, 64).fingerprint() != PoolLayout((GROUP,), TWO, 64).fingerprint()


def test_the_fingerprint_tells_keys_from_values() -> None:
    keys, values = apart(0, 0)
    groups = (replace(GROUP, layers=1),)
    straight = PoolLayout(groups, (keys, values), 64)
    crossed = PoolLayout(groups, (replace(keys, tensor=values.tensor), replace(values, tensor=keys.tensor)), 64)
    assert straight.fingerprint() != crossed.fingerprint()


def test_the_fingerprint_tells_which_group_a_region_holds() -> None:
    groups = (replace(GROUP, layers=1), replace(GROUP, name="h", dtype="int8", layers=1))
    straight = PoolLayout(groups, (Region(0, 0, 1, 0, 8, 8), Region(1, 0, 1, 32, 8, 8)), 64)
    crossed = PoolLayout(groups, (Region(1, 0, 1, 0, 8, 8), Region(0, 0, 1, 32, 8, 8)), 64)
    assert straight.fingerprint() != crossed.fingerprint()
    assert straight.fingerprint() != PoolLayout(groups[::-1], straight.regions, 64).fingerprint()


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 12), st.integers(0, 8), st.integers(1, 4)),
        min_size=1,
        max_size=5,
    )
)
def test_an_accepted_layout_has_no_two_blocks_that_share_a_byte(shapes: list[tuple[int, int, int, int]]) -> None:
    groups = tuple(replace(GROUP, name=f"g{i}", layers=1, blocks=b) for i, (_, _, _, b) in enumerate(shapes))
    regions = [Region(i, 0, 1, o, n + gap, n) for i, (o, n, gap, _) in enumerate(shapes)]
    used = bytes_of(groups, regions)
    assert violations(*regions, groups=groups, total=1000) or len(set(used)) == len(used)


@st.composite
def arrangements(draw: st.DrawFn) -> tuple[tuple[Group, ...], list[Region]]:
    """Draws arrays one after another; the rows of each hold one or more regions, in any order and with gaps."""
    groups: list[Group] = []
    regions: list[Region] = []
    array = 0
    for _ in range(draw(st.integers(1, 4))):
        row = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=3))
        stride = sum(gap + nbytes for gap, nbytes in row) + draw(st.integers(0, 3))
        at = array
        for gap, nbytes in row:
            groups.append(replace(GROUP, name=f"g{len(groups)}", layers=1, blocks=draw(st.integers(1, 4))))
            regions.append(Region(len(regions), 0, 1, at + gap, stride, nbytes))
            at += gap + nbytes
        array += 4 * stride
    return tuple(groups), draw(st.permutations(regions))


@given(arrangements())
def test_arrays_and_rows_in_any_order_are_accepted(made: tuple[tuple[Group, ...], list[Region]]) -> None:
    groups, regions = made
    used = bytes_of(groups, regions)
    assert violations(*regions, groups=groups, total=max(used) + 1) == []
    assert len(set(used)) == len(used)
    assert violations(*regions, groups=groups, total=max(used)) != []
