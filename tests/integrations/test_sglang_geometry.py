"""SGLang's addresses as a pool: what lies where, and what is refused."""

from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvgrpc.core.values.layout import GroupKind, TensorKind
from kvgrpc.integrations.sglang.geometry import memory_of

LAYERS, PAGES, PAGE_TOKENS, TOKEN_BYTES, ROWS = 2, 5, 4, 16, 3


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
    memory = memory_of(args, "bfloat16", latent=False)
    layout = memory.layout
    assert [group.kind for group in layout.groups] == [GroupKind.FULL_ATTENTION, GroupKind.STATE, GroupKind.STATE]
    assert [group.blocks for group in layout.groups] == [PAGES, ROWS, ROWS]
    assert layout.groups[0].head_dim == TOKEN_BYTES // 2
    kv = [(region.first_layer, region.tensor) for region in layout.by_group[0]]
    assert kv == [(0, TensorKind.K), (1, TensorKind.K), (0, TensorKind.V), (1, TensorKind.V)]
    assert layout.total_bytes == sum(array.nbytes for array in held)
    for number, array in enumerate(held):
        array[:] = number + 1
    assert [int(array[0]) for array in memory.arrays] == list(range(1, len(held) + 1))


def test_latents_have_one_buffer_for_each_layer() -> None:
    args, _held = args_of(buffers=3)
    (kv, _aux) = memory_of(args, "bfloat16", latent=True).layout.groups
    assert (kv.kind, kv.layers) == (GroupKind.MLA, 3)


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
        memory_of(args, "bfloat16", latent=False)
