"""Kernels that store keys and values in blocks, each in its own order: vLLM's for processors, and stand-ins for those
of absent devices.
"""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from kvgrpc.core.values.layout import Group, PoolLayout, Region
from kvgrpc.integrations.vllm.geometry import strides_of

BLOCKS, HEADS, DIM = 16, 2, 32


class Rows:
    """Stores like kernels of GPUs: token by token, each value behind its key."""

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, cache: torch.Tensor, slots: torch.Tensor) -> None:
        block_tokens, dim = cache.shape[2], cache.shape[3] // 2
        of = cache.transpose(1, 2)
        of[slots // block_tokens, slots % block_tokens, :, :dim] = key.to(cache.dtype)
        of[slots // block_tokens, slots % block_tokens, :, dim:] = value.to(cache.dtype)


class Interleaved:
    """Stores like kernels for matrix units of processors: pairs of tokens, element by element."""

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, cache: torch.Tensor, slots: torch.Tensor) -> None:
        blocks, heads, tokens, content = cache.shape
        pairs = cache.view(blocks, heads, 2, tokens // 2, content // 2, 2)
        block, token = slots // tokens, slots % tokens
        for number, of in enumerate((key, value)):
            for index in range(len(slots)):
                pairs[block[index], :, number, token[index] // 2, :, token[index] % 2] = of[index]


class Broken:
    def do_kv_cache_update(self, *arguments: Any) -> None:
        raise RuntimeError("no kernel image is available")


def of_processors(cache_dtype: str = "auto") -> CPUAttentionBackendImpl:
    """Returns vLLM's own kernel for processors."""
    made = CPUAttentionBackendImpl.__new__(CPUAttentionBackendImpl)
    made.attn_type, made.kv_cache_dtype = AttentionType.DECODER, cache_dtype
    return made


class Layer(AttentionLayerBase):
    """One layer of a model."""

    isa = "vec"
    _k_scale_float = _v_scale_float = 1.0

    def __init__(self, kernel: Any) -> None:
        self.impl = kernel

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: type(self.impl).__name__)

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        raise NotImplementedError


def config_of(layers: dict[str, Layer], dtype: torch.dtype = torch.float32) -> Any:
    """Returns a configuration of vLLM whose model has these layers."""
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers), model_config=SimpleNamespace(dtype=dtype)
    )


def cache_of(group: Group, dtype: torch.dtype) -> tuple[PoolLayout, list[torch.Tensor]]:
    """Returns a pool of this group as the plugin describes it before it has looked, and its layers as vLLM shows them:
    logical blocks, heads, tokens, keys and values, in the group's order.
    """
    shape = group.blocks, group.kv_heads, group.block_tokens, 2 * group.head_dim
    head_major = group.order == "head_major"
    stored = shape if head_major else (shape[0], shape[2], shape[1], shape[3])
    memory = torch.zeros(group.layers, *stored, dtype=dtype)
    block_bytes = memory[0, 0].nbytes
    strides = strides_of(group, memory.element_size())
    regions = [
        Region(0, layer, 1, layer * memory[0].nbytes, block_bytes, block_bytes, strides=strides)
        for layer in range(group.layers)
    ]
    layout = PoolLayout((group,), tuple(regions), memory.nbytes)
    return layout, [layer if head_major else layer.transpose(1, 2) for layer in memory]
