"""vLLM's KV cache as a pool.

vLLM has one storage for each worker, and one range of block ids for all groups. Layers of different groups lie on the
same bytes: a block belongs to one group at a time. Block 0 stands for blocks that are not there.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from kvgrpc.core.values.layout import WHOLE, Group, GroupKind, PoolLayout, Region, Strides
from kvgrpc.integrations.vllm.states import sections_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

REQUIRED_LAYOUT = "LBHNC"
"""Layout asked of vLLM, so that engines agree: otherwise attention backends for devices would each choose their own."""
ORDERS = {REQUIRED_LAYOUT: "head_major", "LBNHC": "token_major", "BLHNC": "head_major", "BLNHC": "token_major"}
"""Order within a block, by the layouts of vLLM that are served. Each block of a layer is whole, and stands beside
others of the layer, or beside the same block of other layers.
"""
KINDS = {
    "FullAttentionSpec": GroupKind.FULL_ATTENTION,
    "SlidingWindowSpec": GroupKind.SLIDING_WINDOW,
    "MLAAttentionSpec": GroupKind.MLA,
    "MambaSpec": GroupKind.STATE,
}
"""Kinds of groups by vLLM's own names. With its hybrid manager off, layers with a window are full attention: blocks are
there for all tokens, and all of them go. Gated delta nets and short convolutions are Mamba to vLLM too.
"""
_BY_TOKENS = "ranks that have the KV of other tokens"
_MORE_RANKS = "leave {} at 1, and split the model by --tensor-parallel-size or --pipeline-parallel-size"
SPLITS = {
    "prefill_context_parallel_size": (_BY_TOKENS, f"{_MORE_RANKS}; a prefill engine with more of these serves as well"),
    "decode_context_parallel_size": (_BY_TOKENS, f"{_MORE_RANKS}; the engine that decodes may have fewer ranks then"),
}
"""Ways to split an engine that are not served -> the things that there would be several of, and the remedy."""
OTHER_MODEL = (
    "serve this model without a connector, or another one whose layers have full attention, sliding windows, MLA or "
    "states"
)
INSTEAD = {
    "ChunkedLocalAttentionSpec": "start both engines with --disable-hybrid-kv-cache-manager, which keeps all blocks"
}
"""Remedies for layers whose blocks are those of the last chunk."""
SPACE = "kv"
RETAINED_TOKENS = 1
"""Tokens that are kept before a window. vLLM frees a window's first block when the next token does not read it, but an
engine that takes the KV computes the last token once more, which reads it.
"""


def layout_of(config: "VllmConfig", cache: "KVCacheConfig") -> PoolLayout:
    """Returns the pool, as one pipeline stage sees it. Raises ValueError for a pool that this connector does not serve,
    with the reason and a remedy.
    """
    _check_engine(config, cache)
    groups: list[Group] = []
    regions: list[Region] = []
    for number, of in enumerate(cache.kv_cache_groups):
        group, tensor, spec = _group(config, cache, number, of), _tensor(cache, of), of.kv_cache_spec
        if group.kind is GroupKind.STATE:
            strides, block_bytes = None, spec.state_content_size_bytes
        else:
            strides, block_bytes = strides_of(group, spec.dtype.itemsize), spec.unpadded_page_size_bytes
        for layer in range(group.layers):
            at = tensor.offset + layer * tensor.layer_stride
            tensor_kind = WHOLE[group.kind]
            regions.append(Region(number, layer, 1, at, tensor.block_stride, block_bytes, tensor_kind, strides))
        groups.append(group)
    return PoolLayout(tuple(groups), tuple(regions), cache.kv_cache_tensors[0].size)


def joined(stages: Sequence[PoolLayout]) -> PoolLayout:
    """Returns the pool of an engine with these pipeline stages, each as its own workers see it: with its own layers
    alone, numbered from 0. vLLM gives all stages the same groups, with as many blocks of the same size.
    """
    regions = [
        replace(region, first_layer=region.first_layer + first_layers(stages, stage)[region.group], stage=stage)
        for stage, layout in enumerate(stages)
        for region in layout.regions
    ]
    groups = tuple(
        replace(group, layers=layers)
        for group, layers in zip(stages[0].groups, first_layers(stages, len(stages)), strict=True)
    )
    return PoolLayout(groups, tuple(regions), max(layout.total_bytes for layout in stages))


def first_layers(stages: Sequence[PoolLayout], stage: int) -> list[int]:
    """Returns the number of a stage's first layer, for each group: the number of layers in the stages before it."""
    return [sum(layout.groups[i].layers for layout in stages[:stage]) for i in range(len(stages[0].groups))]


def fits_part(layout: PoolLayout) -> bool:
    """Returns whether a load may end early. If groups have different types, vLLM zeroes blocks before use, since bytes
    of one type may be no numbers in another. vLLM does not zero the blocks of a load, so none of these may be left out.
    """
    return len({group.dtype for group in layout.groups if group.kind is not GroupKind.STATE}) <= 1


def retain_windows(cache: "KVCacheConfig") -> None:
    """Makes vLLM keep what the last token reads of each window, as for drafts that compute that token once more. Call
    it before vLLM makes its block manager.
    """
    for group in cache.kv_cache_groups:
        spec = group.kv_cache_spec
        if type(spec).__name__ == "SlidingWindowSpec":
            retained = max(spec.extra_retained_tokens, RETAINED_TOKENS)
            group.kv_cache_spec = replace(spec, extra_retained_tokens=retained)


def memory_of(layout: PoolLayout, caches: Mapping[str, torch.Tensor], layers: Sequence[Sequence[str]]) -> torch.Tensor:
    """Returns a worker's one storage, as bytes. `layers`: names of each group's layers.

    Raises ValueError for tensors that are not where the pool says.
    """
    owners = sum(map(len, layers))
    if len(caches) != owners:
        raise unserved(
            f"layers that have KV of their own; this model has {len(caches)} layers with the KV of {owners}",
            OTHER_MODEL,
        )
    first = caches[layers[0][0]]
    try:
        storage = first.untyped_storage()
    except (AttributeError, RuntimeError) as error:  # a tensor of XLA, or an array of another library
        raise unserved(
            f"caches that are torch tensors with memory of their own; this one is a {type(first).__name__}", OTHER_MODEL
        ) from error
    for region in layout.regions:
        name = layers[region.group][region.first_layer]
        tensor, group = caches[name], layout.groups[region.group]
        there = tensor.untyped_storage().data_ptr(), tensor.data_ptr(), _extent(tensor)
        if there != (storage.data_ptr(), storage.data_ptr() + region.offset, _expected(group, region, tensor)):
            raise unserved(
                f"{group.blocks} {group.order} blocks of {region.block_bytes} bytes for each layer, from byte "
                f"{region.offset} of a worker's one storage on for {name}, which is {tuple(tensor.shape)} "
                f"{tensor.dtype} with strides {tensor.stride()} from byte {there[1] - storage.data_ptr()} on",
                "leave --block-size and VLLM_KV_CACHE_LAYOUT unset",
            )
    if storage.nbytes() < layout.total_bytes:
        raise unserved(f"a storage of {layout.total_bytes} bytes; this one has {storage.nbytes()}", OTHER_MODEL)
    made = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return made.set_(storage)[: layout.total_bytes]


def strides_of(group: Group, item_bytes: int) -> Strides | None:
    """Returns the known strides of a block: one head after the other, where heads come first. The attention backend
    orders a head's keys and values, and may interleave tokens to suit its processor. MLA has none: latents lie token by
    token.
    """
    if group.kind is GroupKind.MLA:
        return None
    head_bytes = 2 * group.block_tokens * group.head_dim * item_bytes
    return Strides(0, 0, head_bytes if group.order == "head_major" else 0, 0)


def _extent(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Returns (elements, bytes from one to the next) of each dimension that has more than one."""
    rows = zip(tensor.shape, tensor.stride(), strict=True)
    return [(count, stride * tensor.element_size()) for count, stride in rows if count > 1]


def _expected(group: Group, region: Region, tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Returns the extent of a layer as vLLM shows it: blocks, heads, tokens, keys and values; for states their bytes,
    one tensor after the other.
    """
    if group.kind is GroupKind.STATE:
        return [row for row in ((group.blocks, region.stride_bytes), (region.block_bytes, 1)) if row[0] > 1]
    item_bytes, parts = tensor.element_size(), 2 if group.kind is not GroupKind.MLA else 1
    content = parts * group.head_dim
    head_bytes, token_bytes = group.block_tokens * content * item_bytes, content * item_bytes
    if group.order == "token_major":
        head_bytes, token_bytes = content * item_bytes, group.kv_heads * content * item_bytes
    found = [
        (group.blocks, region.stride_bytes),
        (group.kv_heads, head_bytes),
        (group.block_tokens, token_bytes),
        (content, item_bytes),
    ]
    return [row for row in found if row[0] > 1]


def _check_engine(config: "VllmConfig", cache: "KVCacheConfig") -> None:
    parallel = config.parallel_config
    for split, (what, instead) in SPLITS.items():
        if (count := getattr(parallel, split)) != 1:
            raise unserved(
                f"engines whose ranks split layers and heads alone; this one has {count} {what}", instead.format(split)
            )
    if parallel.pipeline_parallel_size > 1 and config.speculative_config:
        # vLLM leaves out the end of a step at every stage but the last: what was computed would never be reported.
        raise unserved(
            "speculation without pipeline stages", "leave --speculative-config unset, or --pipeline-parallel-size at 1"
        )
    if config.cache_config.cache_dtype == "int8_per_token_head":
        raise unserved("no cache of int8_per_token_head: vLLM's own tokens are wrong with it", "set --kv-cache-dtype")
    if not cache.kv_cache_groups:
        raise unserved("models with a KV cache; this one has none", OTHER_MODEL)
    for group in cache.kv_cache_groups:
        if (kind := type(group.kv_cache_spec).__name__) not in KINDS:
            what = f"full attention, sliding windows, MLA and states; this model has layers with {kind}"
            raise unserved(what, INSTEAD.get(kind, OTHER_MODEL))
        if not group.layer_names:
            raise unserved(
                f"pipeline stages with layers of every group; this one has none with {kind}",
                "choose a --pipeline-parallel-size that leaves layers of every kind in each stage",
            )
    if (cache.kv_cache_layout or "") not in ORDERS:
        raise unserved(
            f"blocks that are whole in each layer; vLLM chose the layout {cache.kv_cache_layout}",
            f"set VLLM_KV_CACHE_LAYOUT to {REQUIRED_LAYOUT}, or leave it unset",
        )


def _group(config: "VllmConfig", cache: "KVCacheConfig", number: int, of: "KVCacheGroupSpec") -> Group:
    spec: Any = of.kv_cache_spec
    kind = KINDS[type(spec).__name__]
    if kind is GroupKind.STATE:
        return _states(config, cache, number, of)
    heads = spec.num_kv_heads
    plain_bytes = spec.block_size * heads * spec.head_size * spec.dtype.itemsize
    what = "latents"
    if kind is not GroupKind.MLA:
        plain_bytes, what = 2 * plain_bytes, "keys and values"
    if spec.unpadded_page_size_bytes != plain_bytes:
        raise unserved(
            f"blocks of {what} alone; one of a layer has {spec.unpadded_page_size_bytes} bytes, and they take "
            f"{plain_bytes}",
            "choose another --kv-cache-dtype or --block-size",
        )
    return Group(
        f"{kind.value}-{number}", kind, len(of.layer_names), spec.block_size, cache.num_blocks, heads, spec.head_size,
        str(spec.dtype).removeprefix("torch."), order=ORDERS[cache.kv_cache_layout or ""],
        window_tokens=spec.sliding_window if kind is GroupKind.SLIDING_WINDOW else 0,
        total_kv_heads=_total_heads(config, heads) if kind is not GroupKind.MLA else 0, space=SPACE,
    )  # fmt: skip


def _states(config: "VllmConfig", cache: "KVCacheConfig", number: int, of: "KVCacheGroupSpec") -> Group:
    """Returns the group of layers of which each has one state for all tokens of a request that were computed."""
    spec: Any = of.kv_cache_spec
    if spec.num_speculative_blocks:
        raise unserved(
            "states of which a request has one; with speculation it has several", "leave --speculative-config unset"
        )
    types = "+".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in spec.dtypes))
    elements = sum(map(prod, spec.shapes))
    name, layers = f"{GroupKind.STATE.value}-{number}", len(of.layer_names)
    blocks, sections = (spec.block_size, cache.num_blocks), sections_of(config, spec)
    return Group(name, GroupKind.STATE, layers, *blocks, 1, elements, types, space=SPACE, sections=sections)


def _total_heads(config: "VllmConfig", heads: int) -> int:
    """Returns the number of heads over all ranks. Several heads of a rank are no other rank's; a lone one may be. Then
    the layers of a group do not tell how many heads they have in all. The most of any layer are stated, so that ranks
    with different heads never count as having the same.
    """
    ranks: int = config.parallel_config.tensor_parallel_size
    return heads * ranks if heads > 1 else min(ranks, max(_heads_of_layers(config)))


def _heads_of_layers(config: "VllmConfig") -> Iterator[int]:
    """Yields numbers of heads of the model, and of its draft; vLLM's own number leaves out layers with a window."""
    draft = config.speculative_config and config.speculative_config.draft_model_config
    for model in filter(None, (config.model_config, draft)):
        yield model.get_total_num_kv_heads()
        yield getattr(model.hf_text_config, "swa_num_key_value_heads", None) or 0


def _tensor(cache: "KVCacheConfig", of: "KVCacheGroupSpec") -> "KVCacheTensor":
    """Returns the tensor in which the layers of a group lie."""
    for tensor in cache.kv_cache_tensors:
        if tensor.layers == of.layer_names:
            return tensor
    raise unserved("groups whose layers are alike; this model has one with layers of several shapes", OTHER_MODEL)


def unserved(what: str, instead: str) -> ValueError:
    """Returns the error of an engine that this connector does not serve."""
    return ValueError(f"KVGrpcConnector serves {what}. To do: {instead}")
