"""What vLLM's configuration says of kvgrpc, against what is documented."""

import dataclasses
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvgrpc.core.policy.values import Mode, OnLoss
from kvgrpc.core.values.bridge import Side
from kvgrpc.core.values.obstacles import differences
from kvgrpc.integrations.params import Defaults
from kvgrpc.integrations.vllm.connector import KVGrpcConnector
from kvgrpc.integrations.vllm.meeting import Met, agreed_kernels
from kvgrpc.integrations.vllm.options import ORDERS, SPLITS, Options, layout_of
from kvgrpc.integrations.vllm.working import WorkerSide
from tests.docs.pages import DOCS, plain, section, tables


def options_of(policy: str = "fail", **extra: Any) -> Options:
    transfer = SimpleNamespace(kv_connector_extra_config=extra, kv_load_failure_policy=policy)
    model = SimpleNamespace(model="llama", revision=None)
    return Options.of(SimpleNamespace(kv_transfer_config=transfer, model_config=model))


def test_every_option_is_documented_with_its_default() -> None:
    rows = {plain(row[0]): plain(row[1]) for row in tables(section(DOCS / "integrating.md", "## vLLM"))[0]}
    defaults = {field.name: field.default for field in dataclasses.fields(Options)} | vars(Defaults())
    of_vllm = {"defaults", "on_loss"}
    assert rows.keys() == defaults.keys() - of_vllm
    said = {"mode": "pull", "ttl_s": "the lead's", "firm_ttl_s": "the lead's", "offer_ttl_s": "0",
                "serve_flags": "none",
            "weights_revision": "model and revision", "data_paths": '["cma", "nixl"]'}  # fmt: skip
    assert rows == {name: said.get(name, str(defaults[name])) for name in rows}


def test_options_come_from_both_configurations_of_vllm() -> None:
    found = options_of("recompute", mode="push", data_paths=["nixl"], offer_ttl_s=9)
    assert (found.defaults.mode, found.defaults.offer_ttl_s) == (Mode.PUSH, 9.0)
    assert (found.on_loss, found.data_paths) == (OnLoss.RECOMPUTE, ("nixl",))
    assert found.weights_revision == "llama@"


@pytest.mark.parametrize("extra", [{"listne": "x"}, {"mode": "pusch"}])
def test_what_is_unknown_stops_the_start(extra: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"listne|pusch"):
        options_of(**extra)


SHAPE = {"block_size": 32, "num_kv_heads": 4, "head_size": 32, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(**SHAPE)


def laid_out(*specs: KVCacheSpec, layout: str | None = "LBHNC", cache_dtype: str = "auto", **parallel: int) -> Any:
    """The pool of a model with such groups."""
    one = {"tensor_parallel_size": 1, "data_parallel_size": 1, "data_parallel_index": 0, **dict.fromkeys(SPLITS, 1)}
    groups = [KVCacheGroupSpec([f"layers.{number}.{i}" for i in range(2)], spec) for number, spec in enumerate(specs)]
    cache = KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=groups, kv_cache_layout=layout)
    parallel_config = SimpleNamespace(**(one | parallel))
    heads = specs[0].num_kv_heads * parallel_config.tensor_parallel_size  # of the model
    config = SimpleNamespace(
        parallel_config=parallel_config, cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads),
    )  # fmt: skip
    return layout_of(config, cache)


def test_engines_with_full_attention_are_served_whatever_the_number_of_their_ranks() -> None:
    """What is laid out is one rank's share, which vLLM states as such."""
    two = laid_out(FULL, tensor_parallel_size=2, world_size=2)
    (group,) = laid_out(FULL).groups
    assert two == replace(laid_out(FULL), groups=(replace(group, total_kv_heads=8),))
    assert group.order == "head_major"
    assert (group.layers, group.blocks, group.block_tokens, group.dtype) == (2, 10, 32, "bfloat16")


@pytest.mark.parametrize(
    ("specs", "parallel", "reason", "instead"),
    [
        ([FULL], {"pipeline_parallel_size": 2}, "has 2 pipeline stages", "pipeline_parallel_size at 1"),
        ([FULL], {"prefill_context_parallel_size": 2}, "2 ranks that have the KV of other tokens", "at 1"),
        ([FULL], {"decode_context_parallel_size": 4}, "4 ranks that have the KV of other tokens", "at 1"),
        ([FULL], {"nnodes": 2}, "has 2 hosts", "--tensor-parallel-size"),
        ([FULL], {"data_parallel_size": 2}, "no data-parallel engines", "an engine of its own for each rank"),
        ([FULL], {"data_parallel_index": 1}, "no data-parallel engines", "an engine of its own for each rank"),
        ([FULL, FULL], {}, "one KV cache group; this model has 2", "another one"),
        ([SlidingWindowSpec(**SHAPE, sliding_window=64)], {}, "have SlidingWindowSpec", "another one"),
        ([FULL], {"layout": "BLHNC"}, "vLLM chose the layout BLHNC", "VLLM_KV_CACHE_LAYOUT to LBHNC"),
        ([FULL], {"layout": None}, "vLLM chose the layout None", "VLLM_KV_CACHE_LAYOUT to LBHNC"),
        ([MLAAttentionSpec(**SHAPE)], {}, "have MLAAttentionSpec", "another one"),
        ([FULL], {"cache_dtype": "int8_per_token_head"}, "vLLM's own tokens are wrong", "--kv-cache-dtype"),
        ([FullAttentionSpec(**SHAPE, page_size_padded=20_000)], {}, "20000 bytes, and they take 16384", "--block-size"),
    ],
    ids=[
        "stages",
        "prefill_context",
        "decode_context",
        "hosts",
        "data_parallel",
        "data_parallel_dense",
        "groups",
        "sliding",
        "by_block",
        "unresolved",
        "latent",
        "int8",
        "padded",
    ],
)
def test_what_is_not_served_is_refused_with_a_hint(specs: list[Any], parallel: Any, reason: str, instead: str) -> None:
    with pytest.raises(ValueError, match=f"KVGrpcConnector serves .*{reason}.* To do: .*{instead}"):
        laid_out(*specs, **parallel)


def test_heads_are_found_in_a_block_but_not_the_tokens_of_a_head() -> None:
    """Backends interleave tokens to suit their processors, so that blocks of another size hold other bytes."""
    two = FullAttentionSpec(**{**SHAPE, "num_kv_heads": 2})
    longer = FullAttentionSpec(**{**SHAPE, "block_size": 64})
    alone, half = laid_out(FULL), laid_out(two, tensor_parallel_size=2)
    assert all(difference.bridgeable for difference in differences(Side(alone, 1), Side(half, 2)))
    assert not all(difference.bridgeable for difference in differences(Side(alone, 1), Side(laid_out(longer), 1)))
    tokens_first = laid_out(FULL, layout="LBNHC")
    assert not all(difference.bridgeable for difference in differences(Side(alone, 1), Side(tokens_first, 1)))


def test_layers_with_a_window_are_served_where_blocks_are_there_for_all_tokens() -> None:
    """As without the hybrid manager: vLLM calls them full attention, and keeps every block."""
    assert laid_out(FullAttentionSpec(**SHAPE, sliding_window=64)) == laid_out(FULL)


@pytest.mark.parametrize(("layout", "order"), [("LBHNC", "head_major"), ("LBNHC", "token_major")])
def test_caches_are_taken_as_attention_backends_store_them_and_described_so(layout: str, order: str) -> None:
    made = laid_out(FULL, layout=layout)
    stored = KVCacheLayout[layout].layer_view_order
    (blocks, heads, tokens, content) = shape = (10, 4, 32, 64)
    assert made.groups[0].order == order
    for other in KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.LHBNC:
        axes = other.layer_view_order
        physical = torch.zeros([shape[axis] for axis in axes], dtype=torch.bfloat16)
        cache = physical.permute([axes.index(axis) for axis in range(4)])
        assert cache.shape == (blocks, heads, tokens, content)
        worker = WorkerSide(options_of(), made)
        if axes == stored:
            worker.register({"0": cache, "1": cache})
        else:
            with pytest.raises(ValueError, match=f"{order} blocks for"):
                worker.register({"0": cache, "1": cache})
        worker.close()


def test_layers_that_share_their_kv_are_refused() -> None:
    cache = torch.zeros(10, 4, 32, 64, dtype=torch.bfloat16)
    worker = WorkerSide(options_of(), laid_out(FULL))
    with pytest.raises(ValueError, match=r"3 layers with the KV of 2\. To do: .* another one"):
        worker.register({"0": cache, "1": cache.clone(), "2": cache})
    worker.close()


def test_vllm_is_asked_for_a_layout_that_is_served_and_to_come_by_between_layers_that_go_one_by_one() -> None:
    assert KVGrpcConnector.get_required_kvcache_layout(SimpleNamespace()) in ORDERS
    for count in (0, 2):
        assert KVGrpcConnector.requires_piecewise_for_cudagraph({"layers_per_part": count}) is bool(count)


def test_whatever_role_an_engine_has_what_it_hands_over_is_delivered() -> None:
    """vLLM asks the connector, whose default is the role: without, a preempted prefill may leave without its KV."""
    connector = object.__new__(KVGrpcConnector)
    connector._kv_transfer_config = SimpleNamespace(is_kv_producer=False)
    assert not KVConnectorBase_V1.requires_kv_delivery.fget(connector)
    assert connector.requires_kv_delivery


def test_ranks_agree_on_how_they_compute_or_the_engine_does_not_start() -> None:
    usual, other = [["CPU_ATTN", "amx", ""]], [["CPU_ATTN", "vec", ""]]
    assert agreed_kernels([Met("/a", usual), Met("/b", usual)]) == usual
    with pytest.raises(ValueError, match=r"rank 0 has the kernels .*amx.*, rank 1 has .*vec.* To do: "):
        agreed_kernels([Met("/a", usual), Met("/b", other)])
