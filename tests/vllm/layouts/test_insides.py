"""The places of elements within a block depend on the kernel; engines with different kernels exchange KV by them."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvgrpc.core.values.bridge import BridgeSide
from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout, Strides
from kvgrpc.core.values.obstacles import differences
from kvgrpc.integrations.vllm.insides import strides_at, told
from tests.vllm.cores import LAYERS, PROMPT, Core, request_of
from tests.vllm.engines import PREFILL, pushed, wait_until
from tests.vllm.layouts.kernels import (
    BLOCKS,
    DIM,
    HEADS,
    Broken,
    Interleaved,
    Layer,
    Rows,
    cache_of,
    config_of,
    of_processors,
)

FULL = Group("full", GroupKind.FULL_ATTENTION, LAYERS, 32, BLOCKS, HEADS, DIM, "float32", order="head_major")
MODEL_TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.uint8: "uint8"}
TYPES = [(torch.float32, "auto"), (torch.bfloat16, "auto"), (torch.uint8, "fp8_e4m3"), (torch.uint8, "fp8_e5m2")]


def looked(kernel: Any, group: Group, dtype: torch.dtype) -> tuple[PoolLayout, list[torch.Tensor]]:
    """Returns the pool as a worker reports it after it looked at layers with this kernel, and the layers."""
    layout, caches = cache_of(replace(group, dtype=MODEL_TYPES[dtype]), dtype)
    names = [str(layer) for layer in range(group.layers)]
    of_model = torch.bfloat16 if dtype is torch.uint8 else dtype
    config = config_of(dict.fromkeys(names, Layer(kernel)), of_model)
    return told(config, layout, dict(zip(names, caches, strict=True)), [names]), caches


@pytest.mark.parametrize("tokens", [32, 96])
@pytest.mark.parametrize(("dtype", "of_cache"), TYPES)
def test_on_processors_keys_are_found_in_columns_and_values_in_rows(
    dtype: torch.dtype, of_cache: str, tokens: int
) -> None:
    layout, _ = looked(of_processors(of_cache), replace(FULL, block_tokens=tokens), dtype)
    item = dtype.itemsize
    part = tokens * DIM * item
    expected = Strides(0, part, 2 * part, DIM * item, tokens * item)
    assert {region.strides for region in layout.regions} == {expected}


@pytest.mark.parametrize("order", ["head_major", "token_major"])
def test_on_devices_tokens_are_found_one_after_the_other_with_the_value_behind_the_key(order: str) -> None:
    layout, _ = looked(Rows(), replace(FULL, order=order), torch.bfloat16)
    both = 2 * DIM * 2
    head, token = (32 * both, both) if order == "head_major" else (both, HEADS * both)
    assert {region.strides for region in layout.regions} == {Strides(0, DIM * 2, head, token)}


def test_of_a_lone_head_the_tokens_are_found() -> None:
    layout, _ = looked(Rows(), replace(FULL, kv_heads=1), torch.float32)
    assert {region.strides for region in layout.regions} == {Strides(0, DIM * 4, 0, 2 * DIM * 4)}


@pytest.mark.parametrize("kernel", [Interleaved(), Broken(), object()], ids=["interleaved", "broken", "within"])
def test_what_is_not_found_is_known_by_heads_as_before(kernel: Any) -> None:
    layout, _ = looked(kernel, replace(FULL, block_tokens=4), torch.float32)
    plain, _ = cache_of(replace(FULL, block_tokens=4), torch.float32)
    assert layout == plain


def test_a_group_is_known_as_its_least_known_layer_is() -> None:
    layout, caches = cache_of(replace(FULL, block_tokens=4), torch.float32)
    names = [str(layer) for layer in range(LAYERS)]
    layers = dict(zip(names, [Layer(Rows()), Layer(Interleaved())], strict=True))
    assert told(config_of(layers), layout, dict(zip(names, caches, strict=True)), [names]) == layout


def test_latents_and_states_are_what_they_were() -> None:
    group = Group("state", GroupKind.STATE, 1, 2048, BLOCKS, 1, 64, "float32")
    layout, caches = cache_of(replace(FULL, layers=1), torch.float32)
    states = PoolLayout((group,), tuple(replace(r, tensor=_state(), strides=None) for r in layout.regions), 1 << 20)
    assert told(config_of({"0": Layer(Rows())}), states, {"0": caches[0]}, [["0"]]) == states


def _state() -> Any:
    from kvgrpc.core.values.layout import TensorKind

    return TensorKind.STATE


def _shifted(places: torch.Tensor) -> torch.Tensor:
    places[1, 3] += 1
    return places


@pytest.mark.parametrize(
    "change",
    [lambda p: p.flip(0), lambda p: p.flip(1), lambda p: p.flip(2), lambda p: p.flip(3), _shifted,
     lambda p: torch.stack((p[0], p[1].flip(2)))],
    ids=["values first", "tokens backwards", "heads backwards", "elements backwards", "uneven", "values backwards"],
)  # fmt: skip
def test_what_no_strides_say_is_not_found(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    places = torch.arange(2 * 4 * 2 * 8).view(2, 2, 4, 8).transpose(1, 2)  # keys and values, heads, tokens, elements
    assert strides_at(places, 1) == Strides(0, 64, 32, 8)
    assert strides_at(change(places.clone()), 1) is None


SIDES: dict[str, tuple[Callable[[], Any], Group]] = {
    "processor": (of_processors, FULL),
    "blocks of 96": (of_processors, replace(FULL, block_tokens=96)),
    "HND": (Rows, replace(FULL, block_tokens=16)),
    "NHD": (Rows, replace(FULL, block_tokens=16, order="token_major")),
}


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize(
    ("source", "target"),
    [("processor", "blocks of 96"), ("blocks of 96", "processor"), ("HND", "NHD"), ("NHD", "HND"),
     ("processor", "NHD"), ("HND", "blocks of 96")],
)  # fmt: skip
def test_engines_whose_kernels_and_blocks_differ_exchange_every_token(source: str, target: str, mode: str) -> None:
    made = [SIDES[name] for name in (source, target)]
    pools = [looked(kernel(), group, torch.float32) for kernel, group in made]
    found = differences(*(BridgeSide(layout, 1) for layout, _ in pools))
    assert found
    assert all(difference.bridgeable for difference in found)
    with closing(Core("P", cache=pools[0])) as p, closing(Core("D", cache=pools[1])) as d:
        kv = [torch.randn(2, len(PROMPT), HEADS, DIM) for _ in range(LAYERS)]
        if mode == "pull":
            request = request_of("p", PREFILL)
            blocks = p.computing(request)
            stored(p, made[0][0](), kv, blocks)
            target_blocks = d.begin(request_of("d", p.left(request, blocks)))
        else:
            request = request_of("p", {**PREFILL, **pushed(b"k" * 16)})
            p.tables["p"] = blocks = p.computing(request)
            stored(p, made[0][0](), kv, blocks)
            intent = {"do_remote_prefill": True, **pushed(b"k" * 16, p.side.engine.address)}
            target_blocks = d.begin(request_of("d", intent))
            d.step()
            p.step({"p": len(PROMPT)})
            p.left(request, blocks)
        wait_until(lambda: p.step() and d.step() and d.told.loaded == {"d"})
        assert not d.told.failed
        arrived = {name: layer.clone() for name, layer in d.memory.items()}
        stored(d, made[1][0](), kv, target_blocks)
        for name, layer in d.memory.items():  # this engine's own kernel says where each token is
            slots = slots_of(d, target_blocks)
            assert torch.equal(*(tokens_of(made[1][0](), of, slots) for of in (layer, arrived[name])))


def stored(core: Core, kernel: Any, kv: list[torch.Tensor], blocks: list[int]) -> None:
    """Stores these keys and values of the prompt by an engine's kernel, layer by layer."""
    for (key, value), cache in zip(kv, core.memory.values(), strict=True):
        kernel.do_kv_cache_update(Layer(kernel), key, value, cache, slots_of(core, blocks))


def slots_of(core: Core, blocks: list[int]) -> torch.Tensor:
    """Returns the place of each token of the prompt in the cache."""
    tokens = torch.arange(len(PROMPT))
    return torch.tensor(blocks)[tokens // core.block_tokens] * core.block_tokens + tokens % core.block_tokens


def tokens_of(kernel: Any, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Returns the cache's elements at which the kernel stores these tokens."""
    mask = torch.zeros_like(cache)
    ones = torch.ones(len(slots), HEADS, DIM)
    kernel.do_kv_cache_update(Layer(kernel), ones, ones, mask, slots)
    assert int(mask.sum()) == 2 * ones.numel()
    return cache[mask.bool()]
