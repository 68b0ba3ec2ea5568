"""Caches as vLLM describes and allocates them, without their models."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
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
    compute_layout_strides,
    create_kv_cache_views,
)

from kvgrpc.core.values.layout import PoolLayout
from kvgrpc.integrations.vllm.geometry import SPLITS, layout_of
from kvgrpc.integrations.vllm.options import BlockOptions
from kvgrpc.integrations.vllm.worker_side import WorkerSide

BLOCKS, LAYERS = 10, 2
SHAPE: dict[str, Any] = {"block_size": 32, "num_kv_heads": 4, "head_size": 32, "dtype": torch.bfloat16}
FULL, WINDOW = FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=64)
LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
PACKED = replace(FULL, state_content_bytes=136)
CHUNKED = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64)
PARTS = {"shapes": ((3, 40), (4, 8, 16)), "dtypes": (torch.bfloat16, torch.float32)}
STATE = MambaSpec(block_size=2048, **PARTS, page_size_padded=FULL.page_size_bytes)
STATE_BYTES = 3 * 40 * 2 + 4 * 8 * 16 * 4
MIXED = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": FULL, "b": replace(FULL, head_size=64)})


def cache_of(*specs: KVCacheSpec, layout: str | None = "LBHNC", layers: Sequence[int] = ()) -> KVCacheConfig:
    """Returns vLLM's cache of these groups with this many layers each, all of them from the first byte on."""
    counts = layers or [LAYERS] * len(specs)
    groups = [
        KVCacheGroupSpec([f"layers.{n}.{i}" for i in range(count)], spec)
        for n, (spec, count) in enumerate(zip(specs, counts, strict=True))
    ]
    size = BLOCKS * max(spec.page_size_bytes * count for spec, count in zip(specs, counts, strict=True))
    by_block = (layout or "").startswith("B")
    tensors = []
    for group in groups:
        if group.layer_names:
            page, count = group.kv_cache_spec.page_size_bytes, len(group.layer_names)
            layer, block = (page, page * count) if by_block else (page * BLOCKS, page)
            tensors.append(KVCacheTensor(size, group.layer_names, layer_stride=layer, block_stride=block))
    return KVCacheConfig(BLOCKS, tensors, groups, kv_cache_layout=layout)


def laid_out(*specs: KVCacheSpec, layout: str | None = "LBHNC", cache_dtype: str = "auto", **parallel: int) -> Any:
    """Returns the pool of a model with these groups."""
    return laid_out_as(cache_of(*specs, layout=layout), cache_dtype, heads=4, **parallel)


def model_of(heads: int, **more: int | None) -> SimpleNamespace:
    """Returns vLLM's description of a model with this many heads. `more` are fields of its configuration."""
    return SimpleNamespace(get_total_num_kv_heads=lambda: heads, hf_text_config=SimpleNamespace(**more))


def laid_out_as(
    cache: KVCacheConfig, cache_dtype: str = "auto", heads: int = 4, *, model: Any = None, draft: Any = None,
    **parallel: int,
) -> PoolLayout:  # fmt: skip
    one = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, **dict.fromkeys(SPLITS, 1)}
    config: Any = SimpleNamespace(model_config=model or model_of(heads), speculative_config=draft)
    config.parallel_config = SimpleNamespace(**(one | parallel))
    config.cache_config = SimpleNamespace(cache_dtype=cache_dtype)
    return layout_of(config, cache)


def caches_of(cache: KVCacheConfig, layout: str | None = None) -> dict[str, torch.Tensor]:
    """Returns the caches of a vLLM worker, with blocks stored in that order."""
    memory = torch.zeros(cache.kv_cache_tensors[0].size, dtype=torch.int8)
    found: dict[str, torch.Tensor] = {}
    for tensor, group in zip(cache.kv_cache_tensors, cache.kv_cache_groups, strict=True):
        order = KVCacheLayout[layout or cache.kv_cache_layout or ""]
        placed = tensor
        if layout is not None:
            layer_stride, block_stride, *_ = compute_layout_strides(group.kv_cache_spec, BLOCKS, LAYERS, order)
            placed = replace(tensor, layer_stride=layer_stride, block_stride=block_stride)
        views = create_kv_cache_views(memory, group.kv_cache_spec, BLOCKS, order, placed)
        found |= dict(zip(tensor.layers, views, strict=True))
    return found


@contextmanager
def worker_of(layout: PoolLayout) -> Iterator[WorkerSide]:
    with closing(WorkerSide(BlockOptions(), layout)) as worker:
        yield worker


def names(cache: KVCacheConfig) -> list[Sequence[str]]:
    return [group.layer_names for group in cache.kv_cache_groups]
