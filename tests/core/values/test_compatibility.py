"""Compatibility of two engines: one verdict, with a reason for every field that differs."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvgrpc.core.tensors.store_layout import store_layout
from kvgrpc.core.values.compatibility import check_compatible, compare, model_digest, protocol
from kvgrpc.core.values.layout import Group, GroupKind, PoolKind, PoolLayout, Region, TensorKind, uniform_layout
from kvgrpc.core.values.obstacles import EQUAL_FIELDS, SCHEMA_NAMES, SPLIT_FIELDS
from kvgrpc.errors import PreconditionFailed, Reason
from tests.core.nodes import describe, full, hybrid, refused

GROUP = Group("full", GroupKind.FULL_ATTENTION, 2, 16, 8, 2, 4, "float16")
HERE = describe("a", pool=uniform_layout(GROUP, 64))
OTHER: dict[str, Any] = {
    "kind": GroupKind.MLA,
    "layers": 4,
    "block_tokens": 32,
    "kv_heads": 4,
    "head_dim": 8,
    "dtype": "bfloat16",
    "order": "head_major",
    "window_tokens": 1024,
}


def test_an_engine_is_compatible_with_one_like_itself() -> None:
    there = describe("b", 9, pool=HERE.pool, address="elsewhere:1", features=("push",), memory_generation=3)
    assert compare(HERE, there) == []
    check_compatible(HERE, there)


def test_who_manages_the_pool_and_what_groups_are_called_does_not_matter() -> None:
    renamed = uniform_layout(replace(GROUP, name="other"), 64)
    assert compare(HERE, replace(HERE, pool=renamed, pool_kind=PoolKind.SERVER_MANAGED)) == []


def test_every_field_of_a_group_that_must_be_equal_is_in_the_tests() -> None:
    assert set(OTHER) == EQUAL_FIELDS.keys() | SPLIT_FIELDS.keys()


@pytest.mark.parametrize("field", OTHER)
def test_each_field_of_a_group_is_compared_and_named(field: str) -> None:
    there = replace(HERE, pool=uniform_layout(replace(GROUP, **{field: OTHER[field]}), 64))
    found = [d for d in compare(HERE, there) if not d.bridgeable]
    assert [d.field for d in found] == [f"pool.groups[0].{SCHEMA_NAMES.get(field, field)}"]
    assert found[0].here != found[0].there
    assert found[0].why
    with refused(Reason.INCOMPATIBLE_POOLS, PreconditionFailed) as _:
        check_compatible(HERE, there)


def test_kinds_are_shown_by_their_names() -> None:
    there = replace(HERE, pool=uniform_layout(replace(GROUP, kind=GroupKind.MLA), 64))
    (found,) = compare(HERE, there)
    assert (found.here, found.there) == ("full_attention", "mla")


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [((1, 1), (1, 1), 1), ((1, 3), (2, 5), 3), ((2, 5), (1, 3), 3), ((1, 2), (3, 4), None), ((3, 4), (1, 2), None)],
)
def test_the_newest_common_protocol_is_used(
    here: tuple[int, int], there: tuple[int, int], expected: int | None
) -> None:
    a = replace(HERE, protocol_min=here[0], protocol_max=here[1])
    b = replace(HERE, protocol_min=there[0], protocol_max=there[1])
    assert protocol(a, b) == expected
    if expected is None:
        with refused(Reason.PROTOCOL_UNSUPPORTED, PreconditionFailed):
            check_compatible(a, b)


def test_other_weights_are_never_bridged() -> None:
    with refused(Reason.WEIGHTS_MISMATCH, PreconditionFailed):
        check_compatible(HERE, replace(HERE, weights_revision="other"))


def test_unstated_weights_count_as_the_same_and_that_is_told() -> None:
    here = replace(HERE, weights_revision="")
    (found,) = compare(here, replace(here, engine_id="b"))
    assert (found.field, found.bridgeable) == ("weights_revision", True)
    assert found.why
    check_compatible(here, here)
    for a, b in ((here, HERE), (HERE, here)):
        with refused(Reason.WEIGHTS_MISMATCH, PreconditionFailed):
            check_compatible(a, b)


def test_a_feature_that_one_requires_must_be_the_others_too() -> None:
    there = replace(HERE, engine_id="b", features=("new", "old"), required_features=("new",))
    check_compatible(replace(HERE, features=("new",)), there)
    for here in (HERE, replace(HERE, features=("old",))):
        for a, b in ((here, there), (there, here)):
            (found,) = compare(a, b)
            assert (found.field, found.bridgeable) == ("required_features", False)
            assert "engine b requires new" in found.why
            with refused(Reason.PROTOCOL_UNSUPPORTED, PreconditionFailed):
                check_compatible(a, b)


def test_another_number_of_ranks_is_refused() -> None:
    with refused(Reason.INCOMPATIBLE_POOLS, PreconditionFailed):
        check_compatible(HERE, replace(HERE, world_size=2))


def test_another_number_of_groups_is_refused_without_guessing_which_belong_together() -> None:
    (found,) = compare(replace(HERE, pool=hybrid()), replace(HERE, pool=full()))
    assert found.field == "pool.groups"


def test_layers_packed_in_another_way_are_refused() -> None:
    there = replace(HERE, pool=uniform_layout(GROUP, 64, layers_per_region=2))
    (found,) = compare(HERE, there)
    assert found.field == "pool.regions"


def test_regions_are_what_they_hold_in_whatever_order_they_are_listed() -> None:
    swapped = PoolLayout((GROUP,), (Region(0, 1, 1, 0, 64, 64), Region(0, 0, 1, 512, 64, 64)), 1024)
    assert compare(HERE, replace(HERE, pool=swapped)) == []


def test_keys_and_values_that_stand_in_another_way_are_refused() -> None:
    def pool(*tensors: TensorKind) -> PoolLayout:
        regions = [Region(0, 0, 2, 512 * i, 64, 64, tensor) for i, tensor in enumerate(tensors)]
        return PoolLayout((GROUP,), tuple(regions), 1024)

    apart, crossed = pool(TensorKind.K, TensorKind.V), pool(TensorKind.V, TensorKind.K)
    assert compare(replace(HERE, pool=apart), replace(HERE, pool=apart)) == []
    assert compare(replace(HERE, pool=apart), replace(HERE, pool=crossed)) == []
    (found,) = compare(replace(HERE, pool=apart), HERE)
    assert (found.field, found.bridgeable) == ("pool.regions", False)
    assert "k, v" in found.here
    assert "kv" in found.there


def test_layers_packed_in_another_way_are_refused_in_pools_of_different_sizes_too() -> None:
    there = replace(HERE, pool=uniform_layout(replace(GROUP, blocks=9), 64, layers_per_region=2))
    assert [d.field for d in compare(HERE, there)] == ["pool.groups[0].block_count", "pool.regions"]
    with refused(Reason.INCOMPATIBLE_POOLS, PreconditionFailed):
        check_compatible(HERE, there)


def test_pools_of_different_sizes_are_told_and_bridged() -> None:
    there = replace(HERE, pool=uniform_layout(replace(GROUP, blocks=99), 64))
    (found,) = compare(HERE, there)
    assert (found.field, found.bridgeable) == ("pool.groups[0].block_count", True)
    check_compatible(HERE, there)


def test_a_difference_names_its_group() -> None:
    here, there = hybrid(), hybrid(GroupKind.SLIDING_WINDOW)
    (found,) = compare(replace(HERE, pool=here), replace(HERE, pool=there))
    assert found.field == "pool.groups[1].kind"


def test_the_verdict_says_what_is_here_what_is_there_and_why() -> None:
    there = replace(HERE, engine_id="b", world_size=4)
    with pytest.raises(PreconditionFailed, match="engines a and b cannot exchange blocks") as caught:
        check_compatible(HERE, there)
    (violation,) = caught.value.violations
    assert violation.field == "world_size"
    assert violation.description.startswith("1 at a, 4 at b: ")


def test_a_store_of_tensors_and_a_pool_of_blocks_differ_in_that_and_in_nothing_else() -> None:
    store = replace(HERE, engine_id="store", pool=store_layout(1 << 20))
    for one, other in ((HERE, store), (store, HERE)):
        (found,) = compare(one, other)
        assert {found.here, found.there} == {"a staging store of named tensors", "a pool of blocks"}
        with pytest.raises(PreconditionFailed, match="a staging store of named tensors at store") as caught:
            check_compatible(one, other)
        assert caught.value.reason is Reason.INCOMPATIBLE_POOLS
    assert compare(store, replace(store, pool=store_layout(1 << 21)))[0].bridgeable


def test_the_verdict_does_not_depend_on_who_asks() -> None:
    others = [replace(HERE, pool=uniform_layout(replace(GROUP, **{name: OTHER[name]}), 64)) for name in OTHER]
    for there in (*others, replace(HERE, world_size=2), replace(HERE, weights_revision="other")):
        ours, theirs = compare(HERE, there), compare(there, HERE)
        assert [(d.field, d.here, d.there) for d in ours] == [(d.field, d.there, d.here) for d in theirs]


def test_every_reason_is_told_at_once_and_the_gravest_comes_first() -> None:
    there = replace(
        HERE,
        protocol_min=7,
        protocol_max=7,
        weights_revision="other",
        world_size=2,
        pool=uniform_layout(replace(GROUP, dtype="int8", kv_heads=1), 64),
    )
    with pytest.raises(PreconditionFailed) as caught:
        check_compatible(HERE, there)
    assert caught.value.reason is Reason.PROTOCOL_UNSUPPORTED
    assert {v.field for v in caught.value.violations} == {
        "protocol_max",
        "weights_revision",
        "world_size",
        "pool.groups[0].dtype",
        "pool.groups[0].kv_head_count",
    }


@st.composite
def pools(draw: st.DrawFn) -> PoolLayout:
    """Draws pools that often agree: compared fields have two values each; names, sizes and offsets are a pool's own."""
    groups, regions, at = [], list[Region](), draw(st.integers(0, 1)) * 64
    for index in range(draw(st.integers(1, 2))):
        either = st.sampled_from
        layers, blocks, nbytes = draw(st.integers(1, 2)), draw(st.integers(2, 3)), draw(either([4, 8]))
        kind = draw(either([GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW]))
        name = f"{index}{draw(either('ab'))}"
        groups.append(Group(name, kind, layers, draw(either([16, 32])), blocks, 1, 1, draw(either(["u1", "i1"]))))
        each = draw(either(sorted({1, layers})))
        tensors = draw(either([[TensorKind.KV], [TensorKind.K, TensorKind.V]]))
        for first in range(0, layers, each):
            for tensor in tensors:
                regions.append(Region(index, first, each, at, nbytes, nbytes, tensor))
                at += nbytes * blocks
    return PoolLayout(tuple(groups), tuple(regions), at)


@given(pools(), pools())
def test_pools_have_one_fingerprint_exactly_if_they_are_compatible(here: PoolLayout, there: PoolLayout) -> None:
    for one, other in ((here, there), (here, _renamed(here))):
        found = compare(describe("a", pool=one), describe("b", pool=other))
        blocking = [difference for difference in found if not difference.bridgeable]
        assert (one.fingerprint() == other.fingerprint()) is (blocking == [])


def _renamed(pool: PoolLayout) -> PoolLayout:
    return replace(pool, groups=tuple(replace(group, name=f"{group.name}'") for group in pool.groups))


def test_a_model_is_its_name_and_its_weights() -> None:
    assert model_digest("a", "1") == model_digest("a", "1")
    assert len({model_digest(*parts) for parts in (("a", "1"), ("a", "2"), ("b", "1"), ("a1", ""), ("", "a1"))}) == 5
