"""SGLang's addresses as a pool: what lies where, and what is refused."""

from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvgrpc.core.values.bridge import BridgeSide
from kvgrpc.core.values.layout import GroupKind, TensorKind
from kvgrpc.core.values.obstacles import differences
from kvgrpc.integrations.sglang.geometry import Heads, memory_of

LAYERS, PAGES, PAGE_TOKENS, TOKEN_BYTES, ROWS = 2, 5, 4, 16, 3
TWO = Heads(2, 2, 4)
"""Heads that fill a token's bytes in bfloat16."""


class State(Enum):
    """SGLang's names of states."""

    MAMBA = "mamba"
    SWA = "swa"


def arrays(count: int, items: int, item_bytes: int) -> tuple[list[np.ndarray], dict[str, Any]]:
    made = [np.zeros(items * item_bytes, dtype=np.uint8) for _ in range(count)]
    return made, {
        "data_ptrs": [array.ctypes.data for array in made],
        "data_lens": [array.nbytes for array in made],
        "item_lens": [item_bytes] * count,
    }


def args_of(buffers: int = 2 * LAYERS, states: tuple[State, ...] = (), **more: Any) -> tuple[Any, list[np.ndarray]]:
    """Returns SGLang's KVArgs, and the arrays that they name."""
    kv, of_kv = arrays(buffers, PAGES, PAGE_TOKENS * TOKEN_BYTES)
    aux, of_aux = arrays(2, ROWS, 8)
    found = [arrays(LAYERS, ROWS, 32) for _ in states]
    fields = {f"kv_{name}": value for name, value in of_kv.items()}
    fields |= {f"aux_{name}": value for name, value in of_aux.items()}
    for name in of_kv:
        fields[f"state_{name}"] = [of[name] for _, of in found]
    fields |= {"page_size": PAGE_TOKENS, "kv_cache_dtype_str": "auto", "num_draft_entries": 0, "state_types": states}
    return SimpleNamespace(**fields | more), [*kv, *aux, *(array for some, _ in found for array in some)]


def test_keys_values_aux_and_states_lie_where_sglang_has_them() -> None:
    args, held = args_of(states=(State.MAMBA,))
    memory = memory_of(args, "bfloat16", TWO)
    layout = memory.layout
    kinds = [GroupKind.FULL_ATTENTION, GroupKind.MLA, GroupKind.STATE]  # all ranks have the same aux
    assert [group.kind for group in layout.groups] == kinds
    assert [group.blocks for group in layout.groups] == [PAGES, ROWS, ROWS]
    assert (layout.groups[0].kv_heads, layout.groups[0].head_dim) == (2, 4)
    kv = [(region.first_layer, region.tensor) for region in layout.by_group[0]]
    assert kv == [(0, TensorKind.K), (1, TensorKind.K), (0, TensorKind.V), (1, TensorKind.V)]
    assert layout.total_bytes == sum(array.nbytes for array in held)
    for number, array in enumerate(held):
        array[:] = number + 1
    assert [int(array[0]) for array in memory.arrays] == list(range(1, len(held) + 1))


def test_latents_have_one_buffer_for_each_layer() -> None:
    args, _held = args_of(buffers=3)
    (kv, _aux) = memory_of(args, "bfloat16", None).layout.groups
    assert (kv.kind, kv.layers) == (GroupKind.MLA, 3)


def test_a_page_that_is_not_of_the_heads_of_the_model_counts_as_one_head() -> None:
    args, _held = args_of()
    (kv, _aux) = memory_of(args, "bfloat16", Heads(2, 2, 64)).layout.groups
    assert (kv.kv_heads, kv.head_dim, kv.total_kv_heads) == (1, TOKEN_BYTES // 2, 0)


@pytest.mark.parametrize(("states", "refused"), [((), set()), ((State.MAMBA,), {"world_size"})], ids=["none", "mamba"])
def test_other_numbers_of_ranks_are_bridged_unless_there_are_states(
    states: tuple[State, ...], refused: set[str]
) -> None:
    one, _held = args_of(states=states)
    of_two, _of_two_held = args_of(states=states, kv_item_lens=[PAGE_TOKENS * TOKEN_BYTES // 2] * 4)
    sides = [
        BridgeSide(memory_of(one, "bfloat16", Heads(2, 2, 4)).layout, 1),
        BridgeSide(memory_of(of_two, "bfloat16", Heads(1, 2, 4)).layout, 2),
    ]
    assert {found.field for found in differences(*sides) if not found.bridgeable} == refused


def test_across_engines_the_pool_has_keys_and_values_alone() -> None:
    args, _held = args_of()
    memory = memory_of(args, "bfloat16", TWO, across=True)
    assert [group.name for group in memory.layout.groups] == ["kv"]
    assert len(memory.arrays) == 2 * LAYERS
    for refused in ({"states": (State.MAMBA,)}, {"kv_cache_dtype_str": "fp8_e4m3"}):
        args, _held = args_of(**refused)
        with pytest.raises(ValueError, match=r"ACROSS_ENGINES.*To do: "):
            memory_of(args, "bfloat16", TWO, across=True)


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"num_draft_entries": 2}, "draft"),
        ({"states": (State.SWA,)}, "swa"),
        ({"buffers": 3}, "one size"),
        ({"kv_cache_dtype_str": "fp4_e2m1"}, "fp4_e2m1"),
        ({"kv_item_lens": [64, 64, 32, 32]}, "one size"),
    ],
)
def test_what_is_not_served_stops_the_start_and_says_what_to_do(more: dict[str, Any], word: str) -> None:
    args, _held = args_of(**more)
    with pytest.raises(ValueError, match=rf"{word}.*To do: "):
        memory_of(args, "bfloat16", TWO)
