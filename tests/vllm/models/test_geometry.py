"""Caches as vLLM describes and allocates them: which ones are served, and where their bytes are."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    create_kv_cache_views,
)

from kvgrpc.core.values.bridge import Side
from kvgrpc.core.values.layout import GroupKind, PoolLayout, TensorKind
from kvgrpc.core.values.obstacles import differences
from kvgrpc.integrations.params import Defaults
from kvgrpc.integrations.vllm.geometry import SPLITS, layout_of, retain_windows
from kvgrpc.integrations.vllm.options import Options
from kvgrpc.integrations.vllm.working import WorkerSide

BLOCKS, LAYERS = 10, 2
SHAPE: dict[str, Any] = {"block_size": 32, "num_kv_heads": 4, "head_size": 32, "dtype": torch.bfloat16}
FULL, WINDOW = FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=64)
LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
PACKED = replace(FULL, state_content_bytes=136)
STATE = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))
MIXED = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": FULL, "b": replace(FULL, head_size=64)})


def cache_of(*specs: KVCacheSpec, layout: str | None = "LBHNC") -> KVCacheConfig:
    """As vLLM makes it of such groups: all of them from the first byte on."""
    groups = [KVCacheGroupSpec([f"layers.{n}.{i}" for i in range(LAYERS)], spec) for n, spec in enumerate(specs)]
    pages = [spec.page_size_bytes for spec in specs]
    size = LAYERS * BLOCKS * max(pages)
    tensors = [
        KVCacheTensor(size, group.layer_names, layer_stride=BLOCKS * page, block_stride=page)
        for group, page in zip(groups, pages, strict=True)
    ]
    return KVCacheConfig(BLOCKS, tensors, groups, kv_cache_layout=layout)


def laid_out(*specs: KVCacheSpec, layout: str | None = "LBHNC", cache_dtype: str = "auto", **parallel: int) -> Any:
    """The pool of a model with such groups."""
    return laid_out_as(cache_of(*specs, layout=layout), cache_dtype, heads=4, **parallel)


def laid_out_as(cache: KVCacheConfig, cache_dtype: str = "auto", heads: int = 4, **parallel: int) -> PoolLayout:
    one = {"tensor_parallel_size": 1, **dict.fromkeys(SPLITS, 1)}
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(**(one | parallel)), cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads),
    )  # fmt: skip
    return layout_of(config, cache)


def caches_of(cache: KVCacheConfig, layout: str | None = None) -> dict[str, torch.Tensor]:
    """What a worker of vLLM has, with blocks stored in that order."""
    memory = torch.zeros(cache.kv_cache_tensors[0].size, dtype=torch.int8)
    found: dict[str, torch.Tensor] = {}
    for tensor, group in zip(cache.kv_cache_tensors, cache.kv_cache_groups, strict=True):
        order = KVCacheLayout[layout or cache.kv_cache_layout or ""]
        views = create_kv_cache_views(memory, group.kv_cache_spec, BLOCKS, order, tensor)
        found |= dict(zip(tensor.layers, views, strict=True))
    return found


@contextmanager
def worker_of(layout: PoolLayout) -> Iterator[WorkerSide]:
    with closing(WorkerSide(Options(Defaults()), layout)) as worker:
        yield worker


def names(cache: KVCacheConfig) -> list[Sequence[str]]:
    return [group.layer_names for group in cache.kv_cache_groups]


def test_engines_with_full_attention_are_served_whatever_the_number_of_their_ranks() -> None:
    """What is laid out is one rank's share, which vLLM states as such."""
    two = laid_out(FULL, tensor_parallel_size=2, world_size=2)
    (group,) = laid_out(FULL).groups
    assert two == replace(laid_out(FULL), groups=(replace(group, total_kv_heads=8),))
    assert group.order == "head_major"
    assert (group.layers, group.blocks, group.block_tokens, group.dtype) == (LAYERS, BLOCKS, 32, "bfloat16")


def test_of_fewer_heads_than_ranks_several_ranks_have_the_same() -> None:
    (group,) = laid_out_as(cache_of(replace(FULL, num_kv_heads=1)), heads=2, tensor_parallel_size=4).groups
    assert (group.kv_heads, group.total_kv_heads) == (1, 2)


@pytest.mark.parametrize("kind", [FULL, WINDOW], ids=["full", "window"])
def test_heads_are_found_in_a_block_but_not_the_tokens_of_a_head(kind: Any) -> None:
    """Backends interleave tokens to suit their processors, so that blocks of another size hold other bytes."""
    alone, half = laid_out(kind), laid_out(replace(kind, num_kv_heads=2), tensor_parallel_size=2)
    assert all(difference.bridgeable for difference in differences(Side(alone, 1), Side(half, 2)))
    for other in (laid_out(replace(kind, block_size=64)), laid_out(kind, layout="LBNHC")):
        assert not all(difference.bridgeable for difference in differences(Side(alone, 1), Side(other, 1)))


def test_groups_share_one_block_space_and_lie_on_each_other() -> None:
    made = laid_out(WINDOW, FULL, replace(WINDOW, sliding_window=128))
    assert [group.kind for group in made.groups] == [GroupKind.SLIDING_WINDOW, GroupKind.FULL_ATTENTION,
                                                     GroupKind.SLIDING_WINDOW]  # fmt: skip
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


@pytest.mark.parametrize(
    ("specs", "parallel", "reason", "instead"),
    [
        ([FULL], {"pipeline_parallel_size": 2}, "has 2 pipeline stages", "pipeline_parallel_size at 1"),
        ([FULL], {"prefill_context_parallel_size": 2}, "2 ranks that have the KV of other tokens", "at 1"),
        ([FULL], {"decode_context_parallel_size": 4}, "4 ranks that have the KV of other tokens", "at 1"),
        ([FULL], {"nnodes": 2}, "has 2 hosts", "--tensor-parallel-size"),
        ([FULL, STATE], {}, "layers with MambaSpec", "another one"),
        ([MIXED], {}, "layers with UniformTypeKVCacheSpecs", "another one"),
        ([FULL], {"layout": "BLHNC"}, "vLLM chose the layout BLHNC", "VLLM_KV_CACHE_LAYOUT to LBHNC"),
        ([FULL], {"layout": None}, "vLLM chose the layout None", "VLLM_KV_CACHE_LAYOUT to LBHNC"),
        ([FULL], {"cache_dtype": "int8_per_token_head"}, "vLLM's own tokens are wrong", "--kv-cache-dtype"),
        ([PACKED], {}, "17408 bytes, and they take 16384", "--block-size"),
    ],
    ids=[
        "stages",
        "prefill_context",
        "decode_context",
        "hosts",
        "states",
        "unlike",
        "by_block",
        "unresolved",
        "int8",
        "packed",
    ],
)
def test_what_is_not_served_is_refused_with_a_hint(specs: list[Any], parallel: Any, reason: str, instead: str) -> None:
    with pytest.raises(ValueError, match=f"KVGrpcConnector serves .*{reason}.* To do: .*{instead}"):
        laid_out(*specs, **parallel)


def test_a_model_without_a_cache_and_groups_of_unlike_layers_are_refused() -> None:
    """The scheduler is shown one layer's shape for all layers of a group."""
    unlike = cache_of(FULL)
    unlike.kv_cache_tensors[0].layers.pop()
    with pytest.raises(ValueError, match=r"layers are alike.* To do: "):
        laid_out_as(replace(unlike, kv_cache_groups=cache_of(FULL).kv_cache_groups))
    with pytest.raises(ValueError, match=r"models with a KV cache.* To do: "):
        laid_out_as(KVCacheConfig(1, [], []))


def test_layers_with_a_window_are_served_as_full_attention_where_blocks_are_there_for_all_tokens() -> None:
    """As without the hybrid manager: vLLM calls them full attention, and keeps every block."""
    assert laid_out(FullAttentionSpec(**SHAPE, sliding_window=64)) == laid_out(FULL)


def test_vllm_keeps_what_the_last_token_reads_of_a_window() -> None:
    cache = cache_of(WINDOW, FULL, replace(WINDOW, extra_retained_tokens=3))
    retain_windows(cache)
    retained = [getattr(group.kv_cache_spec, "extra_retained_tokens", None) for group in cache.kv_cache_groups]
    assert retained == [1, None, 3]


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize("specs", [[FULL], [WINDOW, FULL], [LATENT]], ids=["full", "window and full", "latent"])
def test_caches_are_taken_as_vllm_stores_them_and_described_so(specs: list[Any], layout: str) -> None:
    cache = cache_of(*specs, layout=layout)
    made = laid_out_as(cache)
    assert {group.order for group in made.groups} == {"head_major" if layout == "LBHNC" else "token_major"}
    with worker_of(made) as worker:
        worker.register(caches_of(cache), names(cache))


@pytest.mark.parametrize(("layout", "other"), [("LBHNC", "LBNHC"), ("LBNHC", "LBHNC")])
def test_caches_in_another_order_are_refused(layout: str, other: str) -> None:
    cache = cache_of(FULL, layout=layout)
    with worker_of(laid_out_as(cache)) as worker, pytest.raises(ValueError, match=r"10 \w+ blocks of .* To do: "):
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


def test_layers_that_share_their_kv_are_refused() -> None:
    cache = cache_of(FULL)
    found = caches_of(cache)
    refused = pytest.raises(ValueError, match=r"3 layers with the KV of 2\. To do: .* another one")
    with worker_of(laid_out_as(cache)) as worker, refused:
        worker.register({**found, "layers.0.2": found["layers.0.0"]}, names(cache))
