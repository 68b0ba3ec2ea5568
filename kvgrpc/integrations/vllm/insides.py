"""The places of keys and values within a block, which are looked at, not assumed.

Each attention backend of vLLM stores keys and values by a kernel of its own, in an order that suits it: on a GPU token
by token, on processors keys often in columns, or several tokens interleaved. So each worker has its kernel store
numbers into a block of scratch memory, and reads where they are. If the places are alike for all tokens, bridges find
each token, and a peer may have blocks of other sizes, or in another order. Otherwise blocks are known by heads only.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout, Strides

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_log = logging.getLogger(__name__)

ATTENTION = GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW


def told(
    config: "VllmConfig", layout: PoolLayout, caches: Mapping[str, torch.Tensor], layers: Sequence[Sequence[str]]
) -> PoolLayout:
    """Returns the pool with the strides that were found within its blocks. `layers`: names of each group's layers.
    Works in a worker whose model is loaded.
    """
    layer_type: Any = AttentionLayerBase  # abstract, which mypy takes no type of
    found: dict[tuple[object, ...], Strides | None] = {}
    insides: list[list[Strides | None]] = []
    for group, names in zip(layout.groups, layers, strict=True):
        modules = get_layers_from_vllm_config(config, layer_type, list(names)) if group.kind in ATTENTION else {}
        insides.append([])
        for module, cache in ((modules.get(name), caches[name]) for name in names):
            backend = module and module.get_attn_backend().get_name()
            kernel = backend, getattr(module, "isa", ""), cache.dtype, cache.shape[1:], cache.stride()[1:]
            if kernel not in found:
                found[kernel] = _found(module, group, cache, config.model_config.dtype)
            insides[-1].append(found[kernel])
    return _with(layout, insides)


def _with(layout: PoolLayout, insides: Sequence[Sequence[Strides | None]]) -> PoolLayout:
    """Returns the pool with `insides`, by group and layer. A group with an unknown layer keeps its own strides."""
    regions = []
    for region in layout.regions:
        some = insides[region.group]
        known = some and None not in some
        regions.append(replace(region, strides=some[region.first_layer]) if known else region)
    return replace(layout, regions=tuple(regions))


def _found(module: Any, group: Group, cache: torch.Tensor, dtype: torch.dtype) -> Strides | None:
    """Returns the strides of one layer; None if it has none, or they were not found."""
    if not hasattr(getattr(module, "impl", None), "do_kv_cache_update"):
        return None  # its kernel stores within the forward pass
    try:
        places = _places(module, group, cache, dtype)
    except Exception:  # noqa: BLE001 - logged: blocks of as many tokens are exchanged all the same
        _log.exception("kvgrpc: where %s stores keys and values was not found", type(module.impl).__name__)
        return None
    strides = None if places is None else strides_at(places, cache.element_size())
    if strides is None:
        what = "kvgrpc: %s interleaves tokens within a block: peers need blocks of %d tokens, too"
        _log.info(what, type(module.impl).__name__, group.block_tokens)
    return strides


def _places(module: Any, group: Group, cache: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Returns for each key and value of a block the item of the block where it was stored, shape [2, tokens, heads,
    elements]. None: some are not stored as they are.

    Numbers are stored bit by bit, as zeros and ones: every type of a cache has these.
    """
    tokens, heads, elements = group.block_tokens, group.kv_heads, group.head_dim
    numbers = torch.arange(1, 2 * tokens * heads * elements + 1).view(2, tokens, heads, elements)
    block = torch.empty_strided(
        (1, *cache.shape[1:]), (numbers.numel(), *cache.stride()[1:]), dtype=cache.dtype, device=cache.device
    )
    items, slots = block.as_strided((numbers.numel(),), (1,)), torch.arange(tokens, device=cache.device)
    read = torch.zeros(numbers.numel(), dtype=torch.int64)
    for bit in range(numbers.numel().bit_length()):
        items.zero_()
        keys, values = (numbers >> bit & 1).to(dtype=dtype, device=cache.device)
        module.impl.do_kv_cache_update(module, keys, values, block, slots)
        read |= (items != 0).cpu().to(torch.int64) << bit
    ordered, places = read.sort()
    return places.view_as(numbers) if torch.equal(ordered, numbers.flatten()) else None


def strides_at(places: torch.Tensor, item_bytes: int) -> Strides | None:
    """Returns the strides that lead to these places, in the form of `_places`; None: no strides do for all tokens."""
    _, tokens, heads, elements = places.shape
    key, value = places
    head = int(key[0, 1, 0] - key[0, 0, 0]) if heads > 1 else 0
    steps = [(int(of[1, 0, 0] - of[0, 0, 0]), int(of[0, 0, 1] - of[0, 0, 0])) for of in (key, value)]
    part = int(value[0, 0, 0] - key[0, 0, 0])
    token, element = (torch.arange(count) for count in (tokens, elements))
    for number, (of, (per_token, per_element)) in enumerate(zip((key, value), steps, strict=True)):
        made = number * part + torch.arange(heads)[None, :, None] * head + token[:, None, None] * per_token
        if not torch.equal(of, made + element[None, None, :] * per_element):
            return None
    (key_token, key_element), (value_token, value_element) = steps
    rows, columns = (key_token, key_element) == (value_token, 1), key_token == 1 < key_element
    if value_element != 1 or min(part, head, value_token) < 0 or not (rows or columns):
        return None
    return Strides(*(item_bytes * of for of in (0, part, head, value_token, key_element if columns else 0)))
