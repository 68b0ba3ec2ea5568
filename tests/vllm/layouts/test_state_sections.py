"""States as vLLM describes them are exchanged section by section between different numbers of ranks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    MambaSpec,
)

from kvgrpc.core.values.bridge import BridgeSide
from kvgrpc.core.values.layout import PoolLayout, Section
from kvgrpc.core.values.obstacles import differences
from tests.vllm.models.caches import (
    FULL,
    STATE,
    cache_of,
    laid_out,
    laid_out_as,
    model_of,
)


def test_states_are_the_same_however_long_prompts_may_be() -> None:
    longer = laid_out(replace(STATE, block_size=4096), FULL)
    assert not differences(BridgeSide(laid_out(STATE, FULL), 1), BridgeSide(longer, 1))


def states_of(ranks: int, kind: str = "MAMBA2", groups: int | None = 1, **change: Any) -> PoolLayout:
    """Returns the pool of a model with 8 heads of 16 elements, `groups` groups of states of 8, and 4-token
    convolutions.
    """
    inputs = 8 * 16 // ranks, 2 * 8 * max((groups or 1) // ranks, 1)
    shapes = ((3, sum(inputs)), (8 // ranks, 16, 8))
    named = MambaAttentionBackendEnum[kind]
    stated = {"shapes": shapes, "mamba_type": named, **change}
    spec = MambaSpec(2048, dtypes=(torch.bfloat16, torch.float32), page_size_padded=1 << 14, **stated)
    model = model_of(4, mamba_n_groups=groups)
    return laid_out_as(cache_of(spec), model=model, tensor_parallel_size=ranks)


@pytest.mark.parametrize(("kind", "groups"), [("MAMBA2", 1), ("MAMBA2", 4), ("GDN_ATTN", 4)])
def test_states_of_other_numbers_of_ranks_are_bridged_section_by_section(kind: str, groups: int) -> None:
    sides = [BridgeSide(states_of(ranks, kind, groups), ranks) for ranks in (1, 2, 4)]
    for here in sides:
        for there in sides:
            assert all(difference.bridgeable for difference in differences(here, there))
    (group,) = states_of(2, kind, groups).groups
    own, common = 128 * 2, 8 * groups * 2
    widths = [own, common, common] if kind == "MAMBA2" else [common, common, own]
    assert [section.total_bytes for section in group.sections] == [*widths * 3, 8 * 16 * 8 * 4]
    assert {section.total_bytes // section.nbytes for section in group.sections} == ({1, 2} if groups == 1 else {2})


@pytest.mark.parametrize(
    "change",
    [{"kind": "LINEAR"}, {"groups": None}, {"tp_replicated": True},
     {"shapes": ((3, 60), (4, 16, 8), (2, 2))}, {"shapes": ((3, 81), (4, 16, 8))}, {"shapes": ((3, 64), (4, 16, 8))}],
    ids=["kind", "groups", "replicated", "more tensors", "odd", "nothing beside"],
)  # fmt: skip
def test_states_of_which_nothing_is_known_are_those_of_as_many_ranks_only(change: dict[str, Any]) -> None:
    split = states_of(2, **{"kind": "MAMBA2", **change})
    assert split.groups[0].sections == ()
    found = differences(BridgeSide(states_of(1), 1), BridgeSide(split, 2))
    assert {"pool.groups[0].head_dim", "world_size"} <= {row.field for row in found if not row.bridgeable}
    assert not differences(BridgeSide(split, 2), BridgeSide(split, 2))


def test_dimensions_of_a_convolution_may_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = MambaSpec(2048, ((144, 3), (8, 16, 8)), (torch.bfloat16, torch.float32), 1 << 14)
    monkeypatch.setattr("kvgrpc.integrations.vllm.states.is_conv_state_dim_first", lambda: True)
    (group,) = laid_out_as(cache_of(spec), model=model_of(4, mamba_n_groups=1)).groups
    assert group.sections == (Section(768, 768), Section(48, 48), Section(48, 48), Section(4096, 4096))
