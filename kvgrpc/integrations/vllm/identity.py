"""The identity of KV beyond its tokens: all of vLLM's configuration that changes the bytes of the same tokens.

Fields of vLLM's model and cache configurations count unless they are listed here: a field of a later vLLM keeps engines
apart until it is known to be harmless. Fields do not count if they change no byte (names, limits, sampling, memory), or
only the last bit of a rounding (graphs, eager mode), or if the layout states them (sizes and order of blocks). Nor do
tensor- and pipeline-parallel sizes.
"""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm import __version__
from vllm.config import get_layers_from_vllm_config
from vllm.config.utils import normalize_value
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.platforms import current_platform
from vllm.utils.torch_utils import is_quantized_kv_cache

from kvgrpc.integrations import across

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_MODEL_BESIDES = """
allow_deprecated_quantization allowed_local_media_path allowed_media_domains config_format convert disable_cascade_attn
enable_cumem_allocator enable_nccl_comm_suspend enable_prompt_embeds enable_sleep_mode enable_trace_replay enforce_eager
generation_config hf_config hf_config_path hf_overrides hf_text_config hf_token io_processor_plugin logits_processors
logprobs_mode max_logprobs max_model_len model model_weights multimodal_config override_generation_config pooler_config
renderer_num_workers return_sampling_mask revision runner seed served_model_name skip_tokenizer_init sleep_mode_backend
sleep_mode_offload_cudagraph sleep_preserve_parameter_names spec_target_max_model_len tokenizer tokenizer_mode
tokenizer_revision trust_remote_code use_fp64_gumbel
"""
MODEL_BESIDES = frozenset(_MODEL_BESIDES.split())
"""Fields of a model that do not count. `BlockOptions.weights_revision` names the weights; the Hugging Face
configuration counts with all overrides. `multimodal_config` counts by its own fields, without `MULTIMODAL_BESIDES`.
"""
_MULTIMODAL_BESIDES = """
allow_missing_mm_embeddings enable_mm_embeds interleave_mm_strings language_model_only limit_per_prompt
mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_only mm_encoder_tp_mode mm_hasher_algorithm
mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_tensor_ipc
skip_mm_profiling
"""
MULTIMODAL_BESIDES = frozenset(_MULTIMODAL_BESIDES.split())
_CACHE_BESIDES = """
_block_size_resolved block_size cache_dtype cache_hit_alignment_tokens effective_attention_block_size
enable_mamba_shared_prefix_checkpoint enable_prefix_caching gpu_memory_utilization hash_block_size is_attention_free
kv_cache_layout kv_cache_max_concurrency kv_cache_memory_bytes kv_cache_size_tokens kv_offloading_backend
kv_offloading_size mamba_block_size mamba_cache_mode mamba_page_size_padded num_cpu_blocks num_gpu_blocks
num_gpu_blocks_override prefix_cache_retention_interval prefix_caching_hash_algo prefix_match_unit
user_specified_block_size
"""
CACHE_BESIDES = frozenset(_CACHE_BESIDES.split())
"""Cache fields that do not count. Engines choose where they cache states, and in which blocks: states are the same."""
HF_BESIDES = frozenset(("_name_or_path", "transformers_version"))
"""Keys that do not count: where the configuration was read, and by which library."""

Kernels = list[list[str]]
"""Attention backend, order within a block, type and scales of the KV, for runs of layers, first to last. States have
their layout and types.
"""


def kernels_of(config: "VllmConfig", layers: list[str]) -> Kernels:
    """Returns the kernels of layers, in a worker whose model is loaded."""
    layer_type: Any = AttentionLayerBase  # abstract, which mypy takes no type of
    found = get_layers_from_vllm_config(config, layer_type, layers)
    return [of for of, _ in itertools.groupby(_kernel(found[name]) for name in layers if name in found)]


def factors_of(config: "VllmConfig", weights_revision: str, kernels: Kernels) -> dict[str, object]:
    """Returns all that KV is of here, by name, for logs and for `identity_of`."""
    speculative = config.speculative_config
    draft = speculative.draft_model_config if speculative and speculative.uses_draft_kv_cache() else None
    return {
        "vllm": __version__,
        "weights": weights_revision,
        "dummy_weights": config.load_config.load_format == "dummy",
        "kernels": kernels,
        "cache_dtype": _kv_dtype(config.cache_config.cache_dtype),
        "lora_dtype": _lora_dtype(config),
        "draft": {"method": speculative.method, "model": f"{draft.model}@{draft.revision or ''}", **_model(draft)}
        if draft
        else None,
        **_fields("cache", config.cache_config, CACHE_BESIDES),
        **_model(config.model_config),
    }


def identity_of(factors: Mapping[str, object]) -> str:
    """Returns the KV's identity. Engines with different ones exchange nothing."""
    digest = hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()
    return f"{factors['weights']};{digest}"


def identity_across(config: "VllmConfig", weights_revision: str) -> str:
    """Returns the KV's identity for engines of other programs too. Raises ValueError for KV that only vLLM reads."""
    model = config.model_config
    if is_quantized_kv_cache(config.cache_config.cache_dtype) or config.speculative_config:
        raise ValueError(
            "KVGrpcConnector serves KV of the model's own type, and no draft, with across_engines. To do: leave "
            "--kv-cache-dtype and --speculative-config unset, or across_engines"
        )
    overrides = model.hf_overrides if isinstance(model.hf_overrides, dict) else {"made by": repr(model.hf_overrides)}
    stated, how = across.stated_config(model.model, model.revision), model.quantization or ""
    return across.identity_of(weights_revision, stated, overrides, quantization=how, model_len=model.max_model_len)


def _model(model: "ModelConfig") -> dict[str, object]:
    hugging_face = _without(model.hf_config.to_dict())
    found = {"hf_config": hugging_face, **_fields("model", model, MODEL_BESIDES)}
    if model.multimodal_config is not None:
        found |= _fields("multimodal", model.multimodal_config, MULTIMODAL_BESIDES)
    if "long_factor" in json.dumps(hugging_face):
        found["max_model_len"] = model.max_model_len  # chooses one of two RoPE scalings
    return found


def _fields(of: str, config: Any, besides: frozenset[str]) -> dict[str, object]:
    names = [field.name for field in dataclasses.fields(config) if field.name not in besides]
    return {f"{of}.{name}": _plain(getattr(config, name)) for name in names}


def _without(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without(found) for key, found in value.items() if key not in HF_BESIDES}
    if isinstance(value, list | tuple):
        return [_without(found) for found in value]
    return _plain(value)


def _plain(value: Any) -> object:
    """Returns a value for JSON. One that vLLM cannot name becomes its repr, and may keep apart engines that fit."""
    try:
        return normalize_value(value)
    except TypeError:
        return repr(value)


def _kv_dtype(name: str) -> str:
    """Returns the KV's type; empty for the model's own type, which the layout says."""
    if not is_quantized_kv_cache(name):
        return ""
    return f"{'fp8_e4m3' if name == 'fp8' else name}, {current_platform.fp8_dtype()}"


def _lora_dtype(config: "VllmConfig") -> str:
    """Returns the adapters' type; empty if it is the model's, or there are no adapters."""
    lora, model = config.lora_config, config.model_config
    return str(lora.lora_dtype) if lora and lora.lora_dtype != model.dtype else ""


def _kernel(layer: Any) -> list[str]:
    return [layer.get_attn_backend().get_name(), *_details(layer)]


def _details(layer: Any) -> Iterator[str]:
    if isinstance(layer, MambaBase):
        yield get_conv_state_layout()  # the dimension that comes first
        yield from map(str, layer.get_state_dtype())
        return
    yield str(getattr(layer, "isa", None) or "")
    dtype = _kv_dtype(getattr(layer, "kv_cache_dtype", "auto"))
    yield dtype
    if dtype:
        yield from (repr(getattr(layer, name, None)) for name in ("_k_scale_float", "_v_scale_float"))
