"""Caches as vLLM describes and allocates them: which ones are served, and where their bytes are."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.model_arch import ModelArchitectureConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
)

from kvgrpc.core.values.bridge import BridgeSide
from kvgrpc.core.values.layout import GroupKind, PoolLayout, TensorKind
from kvgrpc.core.values.obstacles import differences
from kvgrpc.integrations.vllm.geometry import ORDERS, first_layers, fits_part, joined, retain_windows
from tests.vllm.models.caches import (
    BLOCKS,
    CHUNKED,
    FULL,
    LATENT,
    LAYERS,
    MIXED,
    PACKED,
    SHAPE,
    STATE,
    STATE_BYTES,
    WINDOW,
    cache_of,
    caches_of,
    laid_out,
    laid_out_as,
    model_of,
    names,
    worker_of,
)


def test_engines_with_full_attention_are_served_whatever_the_number_of_their_ranks() -> None:
    """The layout is one rank's share, as vLLM states it."""
    two = laid_out(FULL, tensor_parallel_size=2, world_size=2)
    (group,) = laid_out(FULL).groups
    assert two == replace(laid_out(FULL), groups=(replace(group, total_kv_heads=8),))
    assert group.order == "head_major"
    assert (group.layers, group.blocks, group.block_tokens, group.dtype) == (LAYERS, BLOCKS, 32, "bfloat16")


def test_layers_of_two_precisions_are_served_and_take_no_parts_of_a_prompt() -> None:
    """--kv-cache-dtype-skip-layers gives such layers. vLLM zeroes their blocks before use, except where they are
    loaded.
    """
    narrow = replace(FULL, dtype=torch.float8_e4m3fn, block_size=64)
    cache = cache_of(narrow, WINDOW)
    assert [group.dtype for group in laid_out_as(cache).groups] == ["float8_e4m3fn", "bfloat16"]
    assert [cache.needs_kv_cache_zeroing, fits_part(laid_out_as(cache))] == [True, False]
    alike = cache_of(FULL, WINDOW)
    assert [alike.needs_kv_cache_zeroing, fits_part(laid_out_as(alike))] == [False, True]


def test_of_fewer_heads_than_ranks_several_ranks_have_the_same() -> None:
    (group,) = laid_out_as(cache_of(replace(FULL, num_kv_heads=1)), heads=2, tensor_parallel_size=4).groups
    assert (group.kv_heads, group.total_kv_heads) == (1, 2)


@pytest.mark.parametrize(
    ("model", "draft", "total"),
    [
        (model_of(2), None, 2),
        (model_of(2), SimpleNamespace(draft_model_config=None), 2),
        (model_of(2), SimpleNamespace(draft_model_config=model_of(1)), 2),
        (model_of(8), SimpleNamespace(draft_model_config=model_of(16)), 16),
        (model_of(4, swa_num_key_value_heads=8), None, 8),
        (model_of(8, swa_num_key_value_heads=4), None, 8),
        (model_of(4, swa_num_key_value_heads=None), None, 4),
        (model_of(1), SimpleNamespace(draft_model_config=model_of(1, swa_num_key_value_heads=32)), 16),
    ],
)
def test_where_layers_have_other_numbers_of_heads_no_two_ranks_are_said_to_have_the_same(
    model: Any, draft: Any, total: int
) -> None:
    """The number of heads does not tell which layers a group has if each rank has one head."""
    cache = cache_of(replace(FULL, num_kv_heads=1))
    (group,) = laid_out_as(cache, model=model, draft=draft, tensor_parallel_size=16).groups
    assert (group.kv_heads, group.total_kv_heads) == (1, total)


def test_vllm_states_the_most_heads_of_a_model_s_layers() -> None:
    few, many = (
        ModelArchitectureConfig(
            architectures=[], model_type="", text_model_type=None, hidden_size=64, total_num_hidden_layers=2,
            total_num_attention_heads=8, head_size=8, vocab_size=8, total_num_kv_heads=heads, num_experts=0,
            num_experts_per_token=0, quantization_config=None, is_deepseek_mla=False, is_mm_prefix_lm=False,
            rswa_window=None, derived_max_model_len_and_key=(64, None),
        )
        for heads in (4, 8)
    )  # fmt: skip
    model = ModelArchitectureConfig.from_layers([many, few])
    assert [model.total_num_kv_heads, *(model[layer].total_num_kv_heads for layer in range(2))] == [8, 8, 4]


@pytest.mark.parametrize("kind", [FULL, WINDOW], ids=["full", "window"])
def test_heads_are_found_in_a_block_but_not_the_tokens_of_a_head(kind: Any) -> None:
    """Backends interleave tokens to suit their processors, so blocks of another size hold other bytes."""
    alone, half = laid_out(kind), laid_out(replace(kind, num_kv_heads=2), tensor_parallel_size=2)
    assert all(difference.bridgeable for difference in differences(BridgeSide(alone, 1), BridgeSide(half, 2)))
    for other in (laid_out(replace(kind, block_size=64)), laid_out(kind, layout="LBNHC")):
        assert not all(difference.bridgeable for difference in differences(BridgeSide(alone, 1), BridgeSide(other, 1)))


def test_groups_share_one_block_space_and_lie_on_each_other() -> None:
    made = laid_out(WINDOW, FULL, replace(WINDOW, sliding_window=128))
    window, full = GroupKind.SLIDING_WINDOW, GroupKind.FULL_ATTENTION
    assert [group.kind for group in made.groups] == [window, full, window]
    assert [group.window_tokens for group in made.groups] == [64, 0, 128]
    assert made.shared_spaces == ((0, 1, 2),)
    page = FULL.page_size_bytes
    assert made.total_bytes == LAYERS * BLOCKS * page
    assert [(row.group, row.offset, row.stride_bytes) for row in made.regions] == [
        (group, layer * BLOCKS * page, page) for group in range(3) for layer in range(LAYERS)
    ]


def test_padded_blocks_are_served_without_their_padding() -> None:
    padded = replace(FULL, page_size_padded=20_000)
    cache = cache_of(padded)
    made = laid_out_as(cache)
    assert {(row.stride_bytes, row.block_bytes) for row in made.regions} == {(20_000, FULL.page_size_bytes)}
    with worker_of(made) as worker:
        worker.register(caches_of(cache), names(cache))


def test_latents_are_one_head_without_values_that_all_ranks_have() -> None:
    made = laid_out(LATENT, layout="LBNHC", tensor_parallel_size=2)
    (group,) = made.groups
    assert (group.kind, group.kv_heads, group.total_kv_heads, group.head_dim) == (GroupKind.MLA, 1, 0, 576)
    assert {(row.tensor, row.block_bytes) for row in made.regions} == {(TensorKind.LATENT, 16 * 576 * 2)}


def test_states_are_one_block_of_bytes_beside_attention_or_alone() -> None:
    for specs in ([STATE, FULL], [STATE], [STATE, WINDOW, STATE]):
        cache = cache_of(*specs)
        made = laid_out_as(cache)
        group = made.groups[0]
        assert (group.kind, group.layers, group.blocks, group.total_kv_heads) == (GroupKind.STATE, LAYERS, BLOCKS, 0)
        assert (group.head_dim, group.dtype) == (3 * 40 + 4 * 8 * 16, "bfloat16+float32")
        assert group.blocks_of(1) == group.blocks_of(5000) == 1
        rows = {(row.tensor, row.stride_bytes, row.block_bytes) for row in made.regions if row.group == 0}
        assert rows == {(TensorKind.STATE, FULL.page_size_bytes, STATE_BYTES)}
        assert len(set(made.spaces)) == 1
        with worker_of(made) as worker:
            found = caches_of(cache)
            worker.register(found, names(cache))
            with pytest.raises(ValueError, match=f"blocks of {STATE_BYTES} bytes for each layer, .* To do: "):
                worker.register({**found, "layers.0.0": found["layers.0.0"][..., 2:]}, names(cache))


@pytest.mark.parametrize(
    ("specs", "parallel", "reason", "instead"),
    [
        ([FULL], {"prefill_context_parallel_size": 2}, "2 ranks that have the KV of other tokens", "at 1"),
        ([FULL], {"decode_context_parallel_size": 4}, "4 ranks that have the KV of other tokens", "at 1"),
        (
            [FULL],
            {"pipeline_parallel_size": 2, "draft": SimpleNamespace()},
            "speculation without pipeline stages",
            "--speculative-config unset, or --pipeline-parallel-size at 1",
        ),
        ([FULL, CHUNKED], {}, "layers with ChunkedLocalAttentionSpec", "--disable-hybrid-kv"),
        ([replace(STATE, num_speculative_blocks=2)], {}, "with speculation it has several", "--speculative-config"),
        ([MIXED], {}, "layers with UniformTypeKVCacheSpecs", "another one"),
        ([FULL], {"layout": "LHBNC"}, "vLLM chose the layout LHBNC", "VLLM_KV_CACHE_LAYOUT to LBHNC"),
        ([FULL], {"layout": None}, "vLLM chose the layout None", "VLLM_KV_CACHE_LAYOUT to LBHNC"),
        ([FULL], {"cache_dtype": "int8_per_token_head"}, "vLLM's own tokens are wrong", "--kv-cache-dtype"),
        ([PACKED], {}, "17408 bytes, and they take 16384", "--block-size"),
    ],
    ids=[
        "prefill_context",
        "decode_context",
        "drafting stages",
        "chunked",
        "speculation",
        "unlike",
        "by_head",
        "unresolved",
        "int8",
        "packed",
    ],
)
def test_what_is_not_served_is_refused_with_a_hint(specs: list[Any], parallel: Any, reason: str, instead: str) -> None:
    with pytest.raises(ValueError, match=f"KVGrpcConnector serves .*{reason}.* To do: .*{instead}"):
        laid_out(*specs, **parallel)


def test_a_model_without_a_cache_and_groups_of_unlike_layers_are_refused() -> None:
    """The scheduler sees one layer's shape for all layers of a group."""
    unlike = cache_of(FULL)
    unlike.kv_cache_tensors[0].layers.pop()
    with pytest.raises(ValueError, match=r"layers are alike.* To do: "):
        laid_out_as(replace(unlike, kv_cache_groups=cache_of(FULL).kv_cache_groups))
    with pytest.raises(ValueError, match=r"models with a KV cache.* To do: "):
        laid_out_as(KVCacheConfig(1, [], []))


def test_layers_with_a_window_or_chunks_are_served_as_full_attention_where_blocks_are_there_for_all_tokens() -> None:
    """This is the case without the hybrid manager: vLLM calls them full attention, and keeps every block."""
    for kept in ({"sliding_window": 64}, {"attention_chunk_size": 64}):
        assert laid_out(FullAttentionSpec(**SHAPE, **kept)) == laid_out(FULL)


def test_vllm_keeps_what_the_last_token_reads_of_a_window() -> None:
    cache = cache_of(WINDOW, FULL, replace(WINDOW, extra_retained_tokens=3))
    retain_windows(cache)
    retained = [getattr(group.kv_cache_spec, "extra_retained_tokens", None) for group in cache.kv_cache_groups]
    assert retained == [1, None, 3]


@pytest.mark.parametrize("layout", ORDERS)
@pytest.mark.parametrize(
    "specs", [[FULL], [WINDOW, FULL], [LATENT], [STATE, FULL]], ids=["full", "window and full", "latent", "state"]
)
def test_caches_are_taken_as_vllm_stores_them_and_described_so(specs: list[Any], layout: str) -> None:
    cache = cache_of(*specs, layout=layout)
    made = laid_out_as(cache)
    orders = {group.order for group in made.groups if group.kind is not GroupKind.STATE}
    assert orders == {"head_major" if "HN" in layout else "token_major"}
    with worker_of(made) as worker:
        worker.register(caches_of(cache), names(cache))


@pytest.mark.parametrize(
    ("layout", "other"), [("LBHNC", "LBNHC"), ("LBNHC", "LBHNC"), ("LBHNC", "LHBNC"), ("LBNHC", "LHBNC")]
)
def test_caches_in_another_order_are_refused(layout: str, other: str) -> None:
    cache, order = cache_of(FULL, layout=layout), ORDERS[layout]
    with worker_of(laid_out_as(cache)) as worker, pytest.raises(ValueError, match=rf"10 {order} blocks of .* To do: "):
        worker.register(caches_of(cache, other), names(cache))


def test_caches_that_are_elsewhere_are_refused() -> None:
    cache = cache_of(WINDOW, FULL)
    found = caches_of(cache)
    with worker_of(laid_out_as(cache)) as worker:
        for wrong in (
            {**found, "layers.1.0": found["layers.1.1"]},
            {**found, "layers.1.1": found["layers.1.1"].clone()},
            {**found, "layers.0.0": found["layers.0.0"][:9]},
        ):
            with pytest.raises(ValueError, match=r"of a worker's one storage .* To do: "):
                worker.register(wrong, names(cache))
        cache.kv_cache_tensors[0].size *= 2
    with worker_of(laid_out_as(cache)) as worker, pytest.raises(ValueError, match=r"a storage of .* bytes; .* To do: "):
        worker.register(found, names(cache))


def test_caches_of_another_library_are_refused() -> None:
    """vLLM's backend for TPUs has such caches."""
    cache = cache_of(FULL)
    found: dict[str, Any] = dict.fromkeys(caches_of(cache), SimpleNamespace(shape=(10, 4, 32, 64)))
    refused = pytest.raises(ValueError, match=r"caches that are torch tensors .* is a SimpleNamespace\. To do: ")
    with worker_of(laid_out_as(cache)) as worker, refused:
        worker.register(found, names(cache))


def test_layers_that_share_their_kv_are_refused() -> None:
    cache = cache_of(FULL)
    found = caches_of(cache)
    refused = pytest.raises(ValueError, match=r"3 layers with the KV of 2\. To do: .* another one")
    with worker_of(laid_out_as(cache)) as worker, refused:
        worker.register({**found, "layers.0.2": found["layers.0.0"]}, names(cache))


def stage_of(*layers: int, specs: Sequence[KVCacheSpec] = (FULL, WINDOW)) -> PoolLayout:
    """Returns a pipeline stage with this many layers of each group."""
    return laid_out_as(cache_of(*specs, layers=layers), pipeline_parallel_size=2)


@pytest.mark.parametrize(
    "specs", [(FULL, WINDOW), (LATENT, LATENT), (STATE, FULL)], ids=["full and window", "latent", "state and full"]
)
def test_the_stages_of_an_engine_are_one_pool_with_the_layers_of_all(specs: Sequence[KVCacheSpec]) -> None:
    first, second = stage_of(2, 1, specs=specs), stage_of(1, 2, specs=specs)
    pool, whole = joined([first, second]), stage_of(3, 3, specs=specs)
    assert pool.groups == whole.groups
    assert pool.stages == 2
    expected = [(0, 0, 0), (0, 1, 0), (0, 2, 1), (1, 0, 0), (1, 1, 1), (1, 2, 1)]
    assert sorted((r.group, r.first_layer, r.stage) for r in pool.regions) == expected
    assert first_layers([first, second], 0) == [0, 0]
    assert first_layers([first, second], 1) == [2, 1]
    assert joined([first]) == first
    found = differences(BridgeSide(pool, 2), BridgeSide(whole, 1))
    assert found
    assert all(difference.bridgeable for difference in found), found


def test_stages_without_layers_of_some_group_are_not_served() -> None:
    """vLLM keeps the group on such a stage, without layers and without memory."""
    with pytest.raises(ValueError, match=r"stages with layers of every group.* To do: .*--pipeline-parallel-size"):
        stage_of(2, 0)
