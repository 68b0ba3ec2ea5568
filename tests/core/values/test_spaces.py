"""Block spaces: groups of one space share block ids and may lie on the same bytes, block by block; others never do."""

from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import given, strategies as st

from kvgrpc.core.values.block_ids import check_spaces, wrong_lists
from kvgrpc.core.values.compatibility import compare
from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout, Region, TensorKind
from kvgrpc.errors import InvalidRequest, Reason
from tests.core.nodes import aliased, describe, ids, lists, refused

GROUP = Group("g", GroupKind.FULL_ATTENTION, 1, 16, 4, 1, 1, "uint8")


def groups_of(*spaces: str, blocks: int = 4) -> tuple[Group, ...]:
    """Makes a group of one layer for each name of a space."""
    return tuple(replace(GROUP, name=f"g{i}", space=space, blocks=blocks) for i, space in enumerate(spaces))


def violations(groups: tuple[Group, ...], *regions: Region, total: int = 1000) -> list[str]:
    """Returns the fields of a layout that are wrong."""
    try:
        PoolLayout(groups, regions, total)
    except InvalidRequest as error:
        return [violation.field for violation in error.violations]
    return []


def bytes_of(region: Region, block: int) -> set[int]:
    at = region.offset + block * region.stride_bytes
    return set(range(at, at + region.block_bytes))


def test_groups_that_name_no_space_or_different_ones_share_no_blocks() -> None:
    groups = groups_of("", "a", "", "b", "a", "b", "a")
    pool = PoolLayout(groups, tuple(Region(i, 0, 1, 32 * i, 8, 8) for i in range(7)), 224)
    assert pool.spaces == (0, 1, 2, 3, 1, 3, 1)
    assert pool.shared_spaces == ((1, 4, 6), (3, 5))
    assert PoolLayout(groups[:1], pool.regions[:1], 32).shared_spaces == ()


def test_groups_of_one_space_may_lie_on_the_same_bytes() -> None:
    seven = [Region(i, 0, 1, 0, 8, 8) for i in range(7)]
    assert violations(groups_of(*["s"] * 7), *seven) == []
    assert violations(groups_of(*[""] * 7), *seven) == [f"regions[{i}].offset" for i in range(1, 7)]
    states = Region(1, 0, 1, 0, 8, 6, TensorKind.STATE)
    hybrid = groups_of("s", "s")[0], replace(GROUP, name="states", kind=GroupKind.STATE, space="s")
    assert violations(hybrid, seven[0], states) == []


def test_groups_of_different_spaces_never_share_a_byte() -> None:
    on_it = [Region(0, 0, 1, 0, 8, 4), Region(1, 0, 1, 2, 8, 4)]
    assert violations(groups_of("s", "s"), *on_it) == []
    assert violations(groups_of("s", "t"), *on_it) == ["regions[1].offset"]
    assert violations(groups_of("s", ""), *on_it) == ["regions[1].offset"]
    under_both = [Region(0, 0, 1, 0, 16, 8), Region(1, 0, 1, 0, 16, 4), Region(2, 0, 1, 6, 16, 4)]
    assert violations(groups_of("s", "s", "t"), *under_both) == ["regions[2].offset"]
    assert violations(groups_of("s", "t", "s"), *under_both) == ["regions[0].offset"]


def test_a_block_of_one_group_never_shares_a_byte_with_another_block_of_another() -> None:
    first = Region(0, 0, 1, 0, 8, 8)
    for wrong in (
        Region(1, 0, 1, 8, 8, 8),  # block 0 lies on block 1
        Region(1, 0, 1, 4, 8, 8),
        Region(1, 0, 1, 0, 16, 8),  # blocks drift apart
        Region(1, 0, 1, 0, 9, 8),
    ):
        assert violations(groups_of("s", "s"), first, wrong) == ["regions[1].offset"]


def test_the_regions_of_one_group_never_share_a_byte() -> None:
    two_layers = (replace(GROUP, layers=2, space="s"), *groups_of("s", "s")[1:])
    layers = [Region(0, 0, 1, 0, 16, 8), Region(0, 1, 1, 8, 16, 8)]
    other = Region(1, 0, 1, 0, 16, 16)
    assert violations(two_layers, *layers, other) == []
    assert violations(two_layers, other, layers[0], replace(layers[1], offset=6)) == ["regions[2].offset"]


def test_groups_of_one_space_have_the_same_blocks() -> None:
    first, second = groups_of("s", "s")
    regions = Region(0, 0, 1, 0, 8, 8), Region(1, 0, 1, 0, 8, 8)
    assert violations((first, replace(second, blocks=3)), *regions) == ["groups[1].blocks"]
    assert violations((first, replace(second, blocks=3, space="t")), *regions) == ["regions[0].offset"]


def test_what_a_peer_says_of_its_spaces_costs_no_more_than_its_message() -> None:
    """100 groups with 10,000 aliased regions are accepted; without a common space, the number of errors is bounded."""
    groups = tuple(replace(GROUP, name=f"g{i}", space="s", layers=100, blocks=1 << 20) for i in range(100))
    regions = [Region(i, layer, 1, layer, 1 << 20, 1) for i in range(100) for layer in range(100)]
    assert violations(groups, *regions, total=1 << 40) == []
    apart = tuple(replace(group, space="") for group in groups)
    assert 0 < len(violations(apart, *regions, total=1 << 40)) < 100


@given(
    st.lists(
        st.tuples(st.integers(0, 24), st.integers(1, 12), st.sampled_from([12, 24]), st.sampled_from(["", "a", "b"])),
        min_size=2,
        max_size=5,
    )
)
def test_blocks_that_share_a_byte_in_an_accepted_layout_are_one_block_of_a_space(
    shapes: list[tuple[int, int, int, str]],
) -> None:
    groups = groups_of(*(space for *_, space in shapes), blocks=3)
    regions = [Region(i, 0, 1, offset, stride, nbytes) for i, (offset, nbytes, stride, _) in enumerate(shapes)]
    sound = all(
        groups[one.group].space == groups[other.group].space != "" and here == there
        for one, other in combinations(regions, 2)
        for here, there in product(range(3), repeat=2)
        if bytes_of(one, here) & bytes_of(other, there)
    )
    assert sound or violations(groups, *regions)


@given(st.data())
def test_any_regions_within_one_row_that_keep_spaces_apart_are_accepted(data: st.DataObject) -> None:
    halves = {"a": 0, "b": 12}
    spaces = ["a", *data.draw(st.lists(st.sampled_from(["a", "b"]), max_size=5))]
    regions = []
    for i, space in enumerate(spaces):
        first = data.draw(st.integers(0, 11)) if i else 0
        regions.append(Region(i, 0, 1, halves[space] + first, 24, data.draw(st.integers(1, 12 - first))))
    assert violations(groups_of(*spaces), *data.draw(st.permutations(regions))) == []


def test_the_spaces_of_two_engines_are_not_compared() -> None:
    here, there = aliased(), aliased()
    groups = tuple(replace(group, space="") for group in there.groups)
    apart = PoolLayout(groups, tuple(replace(r, offset=r.offset + 4096 * r.group) for r in there.regions), 1 << 16)
    assert compare(describe("p", 1, pool=here), describe("d", 2, pool=apart)) == []
    assert here.fingerprint() == apart.fingerprint()


def test_a_block_is_listed_in_one_group_of_its_space() -> None:
    pool = aliased()
    check_spaces((ids(1, 2), ids(3)), pool, "blocks")
    check_spaces((ids(1, 2), ids()), pool, "blocks")
    with pytest.raises(InvalidRequest, match="block 2 is listed twice") as caught:
        check_spaces((ids(1, 2), ids(2, 3)), pool, "blocks")
    assert caught.value.reason is Reason.BLOCK_DUPLICATE
    with refused(Reason.BLOCK_DUPLICATE):
        check_spaces((ids(), ids(1), ids(7), ids(1)), PoolLayout(
            groups_of("", "s", "", "s"),
            (Region(0, 0, 1, 64, 8, 8), Region(1, 0, 1, 0, 8, 8), Region(2, 0, 1, 32, 8, 8), Region(3, 0, 1, 0, 8, 8)),
            128,
        ), "blocks")  # fmt: skip


def test_a_peer_that_lists_a_block_in_two_groups_of_its_space_is_not_believed() -> None:
    for blocks, wrong in (((1, 2), (3, 4)), ""), (((1, 2), (4, 2)), "block 2 is listed twice"):
        found = wrong_lists(aliased(), lists(*blocks), 32, exact=True)
        assert (wrong in found, bool(found)) == (True, bool(wrong))
