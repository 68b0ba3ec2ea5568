"""Differences between two pools that exchange blocks: which are bridged, which are refused, and what a bridge costs.

Digests of engines are equal where a bridge may join them.
"""

from dataclasses import replace
from typing import Any

import pytest

from kvgrpc.core.values.bridge import STAGING_BYTES, Bridge, BridgeSide
from kvgrpc.core.values.compatibility import (
    CHECKSUMS,
    EngineDescription,
    check_compatible,
    compare,
    layout_digest,
)
from kvgrpc.core.values.head_shares import check_heads
from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout, Region, Section, Strides, TensorKind, uniform_layout
from kvgrpc.core.values.obstacles import ROWS_MAX, Difference, differences
from kvgrpc.core.values.views import view_of
from kvgrpc.errors import InvalidRequest, PreconditionFailed, Reason
from tests.core.nodes import describe, refused

GROUP = Group("full", GroupKind.FULL_ATTENTION, 2, 16, 8, 4, 64, "bfloat16", "head_major")


def side(ranks: int = 1, dtype: str = "bfloat16", layers_per_region: int = 1, **changes: Any) -> BridgeSide:
    """Makes an engine whose blocks have a known inside."""
    heads: dict[str, Any] = {"total_kv_heads": 4, "kv_heads": max(4 // ranks, 1)}
    group = replace(GROUP, dtype=dtype, **(heads | changes))
    parts = 1 if group.kind is GroupKind.MLA else 2
    nbytes = parts * group.block_tokens * group.kv_heads * group.head_dim * 2
    return BridgeSide(uniform_layout(group, nbytes, layers_per_region), ranks)


def named(found: list[Difference], *, bridgeable: bool) -> list[str]:
    return [difference.field for difference in found if difference.bridgeable is bridgeable]


@pytest.mark.parametrize(
    ("there", "fields"),
    [
        (side(2), ["pool.groups[0].kv_head_count", "world_size", "pool.regions"]),
        (side(block_tokens=32), ["pool.groups[0].block_tokens", "pool.regions"]),
        (side(order="token_major"), ["pool.groups[0].order", "pool.regions"]),
        (side(layers_per_region=2), ["pool.regions"]),
        (side(8), ["pool.groups[0].kv_head_count", "world_size", "pool.regions"]),
    ],
)
def test_other_ranks_blocks_orders_and_regions_are_bridged_at_a_cost(there: BridgeSide, fields: list[str]) -> None:
    for a, b in ((side(), there), (there, side())):
        found = differences(a, b)
        assert named(found, bridgeable=True) == fields
        assert not named(found, bridgeable=False)
    check_compatible(describe("a", pool=side().pool), describe("b", 2, pool=there.pool, world_size=there.ranks))


@pytest.mark.parametrize(
    ("there", "field"),
    [
        (side(block_tokens=24), "pool.groups[0].block_tokens"),
        (side(kv_heads=8, total_kv_heads=8), "pool.groups[0].total_kv_head_count"),
        (side(kv_heads=2, total_kv_heads=0), "pool.groups[0].total_kv_head_count"),
        (side(head_dim=32), "pool.groups[0].head_dim"),
        (side(dtype="float16"), "pool.groups[0].dtype"),
    ],
)
def test_what_no_bridge_can_do_is_named(there: BridgeSide, field: str) -> None:
    for a, b in ((side(), there), (there, side())):
        (found,) = (difference for difference in differences(a, b) if not difference.bridgeable)
        assert found.field == field
        assert found.why


def test_a_cost_says_which_runs_move_and_what_is_read_for_them() -> None:
    (*_, found) = differences(side(), side(2))
    assert found.why == "group full: into here in runs of 4096 bytes, into there in runs of 4096 bytes"
    (*_, found) = differences(side(), side(2, order="token_major"))
    assert "into here re-packed in runs of 128 bytes, for which 1 times the bytes are read" in found.why
    assert "into there re-packed in runs of 128 bytes, for which 2 times the bytes are read" in found.why


def test_blocks_of_which_nothing_is_known_move_whole_between_ranks_with_the_same_numbers() -> None:
    def opaque(ranks: int, kind: GroupKind = GroupKind.FULL_ATTENTION, nbytes: int = 656, **changes: Any) -> BridgeSide:
        group = replace(GROUP, kind=kind, dtype="fp8_with_scales", kv_heads=1, **changes)
        return BridgeSide(uniform_layout(group, nbytes), ranks)

    assert not differences(opaque(2), opaque(2))
    assert named(differences(opaque(1), opaque(2)), bridgeable=False) == ["world_size"]
    assert named(differences(opaque(1), opaque(1, block_tokens=32)), bridgeable=False) == [
        "pool.groups[0].block_tokens"
    ]
    assert named(differences(opaque(1), opaque(1, nbytes=664)), bridgeable=False) == ["pool.regions"]
    latents = differences(opaque(1, GroupKind.MLA), opaque(2, GroupKind.MLA))
    assert named(latents, bridgeable=False) == []
    assert Bridge(opaque(1, GroupKind.MLA), opaque(2, GroupKind.MLA)).run_bytes(0) == 656


@pytest.mark.parametrize(("ranks", "totals"), [(2, (1, 0)), (4, (1, 2))])
def test_blocks_that_move_whole_move_between_ranks_with_the_same_heads(ranks: int, totals: tuple[int, int]) -> None:
    """Otherwise a rank would read from a rank that does not exist, or from one with other heads."""
    groups = [replace(GROUP, dtype="fp8_with_scales", kv_heads=1, total_kv_heads=total) for total in totals]
    here, there = (BridgeSide(uniform_layout(group, 656), ranks) for group in groups)
    for a, b in ((here, there), (there, here)):
        assert named(differences(a, b), bridgeable=False) == ["pool.groups[0].total_kv_head_count"]


def by_heads(
    ranks: int, tokens: int = 16, *, apart: bool = False, known: bool = True, order: str = "head_major"
) -> BridgeSide:
    """Makes an engine that knows where heads are in a block, but not where the tokens of a head are."""
    group = replace(GROUP, kv_heads=4 // ranks, total_kv_heads=4, block_tokens=tokens, order=order)
    head_bytes = (1 if apart else 2) * tokens * group.head_dim * 2
    strides = Strides(0, 0, head_bytes if known else 0, 0)
    tensors, nbytes = ([TensorKind.K, TensorKind.V] if apart else [TensorKind.KV]), head_bytes * group.kv_heads
    places = [(layer, tensor) for layer in range(2) for tensor in tensors]
    regions = [
        Region(0, layer, 1, i * 8 * nbytes, nbytes, nbytes, tensor, strides) for i, (layer, tensor) in enumerate(places)
    ]
    return BridgeSide(PoolLayout((group,), tuple(regions), 8 * nbytes * len(places)), ranks)


def test_heads_move_whole_where_nothing_is_known_of_their_tokens() -> None:
    for a, b in ((by_heads(1), by_heads(2)), (by_heads(1, apart=True), by_heads(2, apart=True))):
        assert not named(differences(a, b), bridgeable=False)
        bridge = Bridge(a, b)
        assert not bridge.repacked
        assert bridge.run_bytes(0) == (a.pool.regions[0].block_bytes // 2)


@pytest.mark.parametrize(
    ("there", "field"),
    [
        (by_heads(1, 32), "pool.groups[0].block_tokens"),
        (by_heads(1, order="token_major"), "pool.groups[0].order"),
        (by_heads(1, apart=True), "pool.regions"),
        (side(), "pool.regions"),
        (by_heads(2, known=False), "pool.groups[0].kv_head_count"),
    ],
)
def test_without_tokens_nothing_is_put_into_another_order_or_size(there: BridgeSide, field: str) -> None:
    for a, b in ((by_heads(1), there), (there, by_heads(1))):
        assert field in named(differences(a, b), bridgeable=False)


def test_heads_that_are_together_in_some_layers_stay_so_in_these() -> None:
    """Otherwise keys of one head would be written over those of the next, or over another block."""

    def mixed(together: int) -> BridgeSide:
        """Keys and values are together in one of two layers."""
        group = replace(GROUP, kv_heads=4, total_kv_heads=4)
        half = 4 * 16 * 64 * 2
        regions, at = [], 0
        for layer in range(2):
            for tensor in [TensorKind.KV] if layer == together else [TensorKind.K, TensorKind.V]:
                nbytes = 2 * half if tensor is TensorKind.KV else half
                strides = Strides(0, 0, nbytes // 4, 0)
                regions.append(Region(0, layer, 1, at, nbytes, nbytes, tensor, strides))
                at += 8 * nbytes
        return BridgeSide(PoolLayout((group,), tuple(regions), at), 1)

    assert not differences(mixed(0), mixed(0))
    assert named(differences(mixed(0), mixed(1)), bridgeable=False) == ["pool.regions"]


def test_states_move_between_equal_ranks_only() -> None:
    group = Group("s", GroupKind.STATE, 1, 16, 8, 1, 1, "uint8")
    pool = PoolLayout((group,), (Region(0, 0, 1, 0, 64, 64, TensorKind.STATE),), 512)
    assert not differences(BridgeSide(pool, 2), BridgeSide(pool, 2))
    (found,) = differences(BridgeSide(pool, 2), BridgeSide(pool, 1))
    assert (found.field, found.here, found.there, found.bridgeable) == ("world_size", "2", "1", False)
    assert "group s nothing is known of the inside of blocks" in found.why
    assert "as many ranks" in found.why


def test_states_of_engines_with_longer_prompts_or_other_blocks_are_the_same() -> None:
    group = Group("s", GroupKind.STATE, 1, 16, 8, 1, 16, "float32+bfloat16")
    regions = (Region(0, 0, 1, 0, 64, 64, TensorKind.STATE),)
    here, there, larger = (
        BridgeSide(PoolLayout((replace(group, **changes),), regions, 512), 1)
        for changes in ({}, {"block_tokens": 2048, "order": "head_major"}, {"head_dim": 32})
    )
    assert not differences(here, there)
    assert here.pool.fingerprint() == there.pool.fingerprint()
    assert named(differences(here, larger), bridgeable=False) == ["pool.groups[0].head_dim"]


def test_blocks_that_no_staging_buffer_holds_are_refused() -> None:
    large: dict[str, Any] = {"block_tokens": 4096, "layers": 64, "blocks": 2}
    found = differences(side(**large), side(order="token_major", **large))
    assert named(found, bridgeable=False) == ["pool.regions"]
    assert f"{STAGING_BYTES} bytes" in found[-1].why


def test_more_regions_between_more_ranks_than_anybody_plans_are_refused() -> None:
    many = ROWS_MAX // 16
    found = differences(side(1, layers=many, blocks=1), side(16, layers=many, blocks=1))
    assert named(found, bridgeable=False) == ["pool.regions"]


def test_checksums_take_ranks_and_blocks_that_are_the_same() -> None:
    here = describe("a", pool=side().pool, features=(CHECKSUMS,))
    there = describe("b", 2, pool=side(2).pool, world_size=2, features=(CHECKSUMS,), required_features=(CHECKSUMS,))
    assert named(compare(here, there), bridgeable=False) == ["required_features"]
    with refused(Reason.PROTOCOL_UNSUPPORTED, PreconditionFailed):
        check_compatible(here, there)
    check_compatible(here, replace(there, pool=here.pool, world_size=1))


@pytest.mark.parametrize(("ranks", "heads", "total"), [(2, 2, 4), (4, 1, 2), (4, 1, 1), (1, 4, 4), (2, 3, 0)])
def test_heads_are_shared_out_equally(ranks: int, heads: int, total: int) -> None:
    check_heads(side(kv_heads=heads, total_kv_heads=total).pool, ranks)


@pytest.mark.parametrize(("ranks", "heads", "total"), [(2, 2, 2), (4, 1, 3), (3, 1, 2), (2, 4, 4)])
def test_heads_that_ranks_cannot_have_are_refused(ranks: int, heads: int, total: int) -> None:
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        check_heads(side(kv_heads=heads, total_kv_heads=total).pool, ranks)


@pytest.mark.parametrize("change", [{"total_kv_heads": -1}, {"kind": GroupKind.MLA, "total_kv_heads": 4}])
def test_a_group_states_the_heads_of_its_model_only_where_ranks_share_them(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        side(**change)
    assert [violation.field for violation in caught.value.violations] == ["groups[0].total_kv_heads"]


def strided(strides: Strides, dtype: str = "uint8") -> PoolLayout:
    group = replace(GROUP, layers=1, kv_heads=2, head_dim=4, block_tokens=2, dtype=dtype)
    return PoolLayout((group,), (Region(0, 0, 1, 0, 32, 32, strides=strides),), 256)


def test_strides_say_where_the_elements_of_a_block_are() -> None:
    strides = Strides(0, 4, 16, 8)
    pool = strided(strides)
    view = view_of(pool.groups[0], pool.regions[0])
    assert view is not None
    assert (view.parts, view.heads, view.tokens, view.run_bytes, view.strides) == (2, 2, 2, 4, strides)
    assert pool.fingerprint() != strided(Strides(0, 16, 8, 4)).fingerprint()


def test_keys_may_stand_in_columns() -> None:
    pool = strided(Strides(0, 8, 16, 4, 2))
    view = view_of(pool.groups[0], pool.regions[0])
    assert view is not None
    assert view.tells_tokens
    assert [view.inner(part) for part in range(2)] == [(1, 2), (4, 1)], "of tokens and elements: keys, then values"
    assert pool.has_key_columns
    assert not strided(Strides(0, 8, 16, 4)).has_key_columns
    assert pool.fingerprint() != strided(Strides(0, 8, 16, 4)).fingerprint()


def test_values_and_latents_stand_in_no_columns() -> None:
    for kind, tensor in ((GroupKind.FULL_ATTENTION, TensorKind.V), (GroupKind.MLA, TensorKind.LATENT)):
        group = replace(GROUP, kind=kind, layers=1, kv_heads=1, head_dim=4, block_tokens=2, total_kv_heads=0)
        regions = [Region(0, 0, 1, 0, 16, 16, tensor, strides=Strides(0, 0, 0, 4, 2))]
        if tensor is TensorKind.V:
            regions.append(Region(0, 0, 1, 256, 16, 16, TensorKind.K, strides=Strides(0, 0, 0, 0, 2)))
        with pytest.raises(InvalidRequest, match="keys alone stand in columns"):
            PoolLayout((group,), tuple(regions), 512)


def test_an_engine_may_say_that_nothing_is_known_of_the_inside_of_its_blocks() -> None:
    for heads in (1, 2):
        group = replace(GROUP, kv_heads=heads)
        pool = uniform_layout(group, 100, 2, Strides(0, 0, 0, 0))
        assert view_of(pool.groups[0], pool.regions[0]) is None


@pytest.mark.parametrize(
    ("strides", "dtype"),
    [
        (Strides(0, 4, 16, 4), "uint8"),
        (Strides(0, 4, 8, 8), "uint8"),
        (Strides(0, 16, 8, 2), "uint8"),
        (Strides(0, 20, 8, 4), "uint8"),
        (Strides(33, 4, 16, 8), "uint8"),
        (Strides(2**64 - 1, 4, 16, 8), "uint8"),
        (Strides(0, 4, 16, -8), "uint8"),
        (Strides(0, 4, 16, 8), "int4"),
        (Strides(0, 4, 16, 0), "uint8"),
        (Strides(4, 0, 0, 0), "uint8"),
        (Strides(0, 0, 8, 0), "uint8"),
        (Strides(0, 8, 16, 4, 1), "uint8"),
        (Strides(0, 8, 16, 3, 2), "uint8"),
        (Strides(0, 7, 16, 4, 2), "uint8"),
        (Strides(0, 8, 15, 4, 2), "uint8"),
        (Strides(0, 8, 20, 4, 2), "uint8"),
        (Strides(0, 8, 16, 4, -2), "uint8"),
    ],
)
def test_strides_that_let_elements_overlap_or_leave_the_block_are_refused(strides: Strides, dtype: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        strided(strides, dtype)
    assert "regions[0].strides" in [violation.field for violation in caught.value.violations]


def states(ranks: int, totals: tuple[int, ...] = (24, 6), *, known: bool = True, same: int = 0) -> BridgeSide:
    """Makes states of which ranks have equal shares, except the section numbered `same`, which every rank has whole."""
    sections = tuple(Section(total if i == same else total // ranks, total) for i, total in enumerate(totals))
    nbytes = sum(section.nbytes for section in sections)
    group = Group("s", GroupKind.STATE, 2, 16, 8, 1, nbytes, "float32", sections=sections if known else ())
    regions = tuple(Region(0, i, 1, i * 8 * nbytes, nbytes, nbytes, TensorKind.STATE) for i in range(2))
    return BridgeSide(PoolLayout((group,), regions, 16 * nbytes), ranks)


@pytest.mark.parametrize(("here", "there"), [(1, 2), (2, 1), (2, 3), (3, 6)])
def test_states_whose_sections_are_known_are_exchanged_by_other_numbers_of_ranks(here: int, there: int) -> None:
    found = differences(states(here), states(there))
    assert {difference.field for difference in found} == {"world_size", "pool.regions"}
    assert all(difference.bridgeable for difference in found)
    assert not differences(states(here), states(here))
    assert not differences(states(here), states(here, known=False)), "whole states of as many ranks are what they are"


def test_states_of_other_sections_or_of_unknown_ones_are_not() -> None:
    def blocking(here: BridgeSide, there: BridgeSide) -> list[str]:
        return [difference.field for difference in differences(here, there) if not difference.bridgeable]

    assert blocking(states(1), states(2, (24, 12))) == ["pool.groups[0].state_sections"]
    assert blocking(states(1), states(2, (24, 6, 6))) == ["pool.groups[0].state_sections"]
    assert blocking(states(1), states(2, known=False)) == ["pool.groups[0].head_dim", "world_size"]


def test_ranks_that_have_the_same_of_another_section_are_bridged_also_where_they_are_as_many() -> None:
    found = differences(states(2), states(2, same=1))
    assert found
    assert all(difference.bridgeable for difference in found)


@pytest.mark.parametrize(
    "change",
    [
        {"sections": (Section(24, 24),)},
        {"sections": (Section(30, 45),)},
        {"sections": (Section(0, 24), Section(30, 30))},
        {"sections": (Section(30, 0),)},
        {"kind": GroupKind.MLA},
    ],
)
def test_sections_that_are_not_those_of_a_state_are_refused(change: dict[str, Any]) -> None:
    pool = states(1).pool
    tensor = TensorKind.LATENT if "kind" in change else TensorKind.STATE
    regions = tuple(replace(region, tensor=tensor) for region in pool.regions)
    with pytest.raises(InvalidRequest) as caught:
        PoolLayout((replace(pool.groups[0], **change),), regions, pool.total_bytes)
    assert "groups[0].sections" in [violation.field for violation in caught.value.violations]


def test_sections_that_ranks_have_no_equal_shares_of_are_refused() -> None:
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        check_heads(states(2).pool, 3)


def engine(ranks: int = 1, **changes: object) -> EngineDescription:
    made = side(ranks, **changes)  # type: ignore[arg-type] # fields of a group
    return describe("a", pool=made.pool, world_size=ranks)


def state(head_dim: int, sections: tuple[Section, ...]) -> EngineDescription:
    group = replace(GROUP, kind=GroupKind.STATE, head_dim=head_dim, sections=sections, kv_heads=1, total_kv_heads=0)
    return describe("a", pool=uniform_layout(group, sum(section.nbytes for section in sections)))


def test_engines_that_a_bridge_joins_have_one_digest() -> None:
    bridged = [engine(2), engine(8), engine(block_tokens=32), engine(order="token_major"), engine(layers_per_region=2)]
    bridged += [engine(blocks=4), engine(block_tokens=24)]
    assert {layout_digest(one) for one in bridged} == {layout_digest(engine())}


def test_engines_that_no_bridge_joins_have_other_digests() -> None:
    others = [engine(head_dim=32), engine(dtype="float16"), engine(layers=4), engine(kv_heads=8, total_kv_heads=8)]
    others += [engine(window_tokens=64), engine(kind=GroupKind.MLA, total_kv_heads=0)]
    found = [layout_digest(one) for one in (engine(), *others)]
    assert len(set(found)) == len(found)
    assert all(any(not row.bridgeable for row in compare(engine(), one)) for one in others)


def test_states_are_told_apart_by_their_sections_and_not_by_the_sizes_of_heads() -> None:
    sections = (Section(64, 64), Section(64, 64))
    assert layout_digest(state(64, sections)) == layout_digest(state(32, sections))


def test_a_pool_of_two_groups_is_another_one() -> None:
    one = side().pool
    groups = (one.groups[0], replace(one.groups[0], name="other"))
    moved = tuple(replace(region, group=1, offset=region.offset + one.total_bytes) for region in one.regions)
    two = PoolLayout(groups, (*one.regions, *moved), 2 * one.total_bytes)
    assert layout_digest(describe("a", pool=two)) != layout_digest(engine())
