"""The options of this mode in vLLM's configuration are documented, and unsupported engines are refused."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.platforms import current_platform

from kvgrpc.core.policy.values import OnLoss
from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout, uniform_layout
from kvgrpc.integrations.vllm.connector import KVGrpcConnector
from kvgrpc.integrations.vllm.tensors.options import SendMode, TensorOptions, address_of, check
from tests.docs.pages import DOCS, plain, section, tables


def config_of(policy: str = "fail", **extra: Any) -> Any:
    transfer = SimpleNamespace(kv_connector_extra_config={"mode": "tensors", **extra}, kv_load_failure_policy=policy)
    parallel = SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1, tensor_parallel_size=1, nnodes=1)
    model_config = SimpleNamespace(model="llama", revision=None)
    return SimpleNamespace(
        kv_transfer_config=transfer, model_config=model_config, parallel_config=parallel, speculative_config=None
    )


def group_of(kind: GroupKind, name: str = "a", **more: Any) -> Group:
    return Group(name, kind, 2, 32, 8, 1, 64, "float16", **more)


FULL = uniform_layout(group_of(GroupKind.FULL_ATTENTION), 2 * 32 * 64 * 2)


def test_every_option_is_documented_with_its_default() -> None:
    rows = {
        plain(row[0]): plain(row[1]) for row in tables(section(DOCS / "integrating.md", "### Prompts as tensors"))[-1]
    }
    defaults = {field.name: field.default for field in dataclasses.fields(TensorOptions)}
    said = {
        "send": "put_async", "ttl_s": "the lead's", "serve_flags": "none", "weights_revision": "model and revision",
        "data_paths": '["shm", "cma", "nixl", "cuda_vmm", "collective"]', "store_bytes": "1 GiB",
        "waiting_bytes": "4 GiB", "timeout_s": "30", "queued_bytes": "256 MiB", "when_full": "give_up",
        "peers": "none", "proxy_ip": "none", "proxy_port": "none", "http_port": "none", "pairing_secret_file": "none",
    }  # fmt: skip
    assert rows == {name: said.get(name, str(default)) for name, default in defaults.items() if name != "on_loss"}


def test_options_come_from_both_configurations_of_vllm() -> None:
    found = TensorOptions.of(config_of("recompute", send="get", data_paths=["shm"]))
    assert (found.on_loss, found.send, found.data_paths) == (OnLoss.RECOMPUTE, SendMode.GET, ("shm",))
    assert found.weights_revision == "llama@"


@pytest.mark.parametrize(
    "extra", [{"sned": "put"}, {"send": "psuh"}, {"layers_per_part": 1}, {"mirror": True},
              {"offer_ttl_s": 3}, {"store_bytes": 5}, {"page_bytes": 1000}, {"timeout_s": 0}, {"queued_bytes": -1},
              {"when_full": "drop"}, {"proxy_ip": "10.0.0.1"}, {"send_type": "PUT"}, {"kv_lease_duration": 30},
              {"pairing_secret_file": "/nowhere"}],
    ids=str,
)  # fmt: skip
def test_what_is_unknown_or_wrong_stops_the_start(extra: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match={"send": "psuh", "when_full": "drop"}.get(name := next(iter(extra)), name)):
        TensorOptions.of(config_of(**extra))


def test_each_rank_has_the_port_after_the_last_one() -> None:
    assert [address_of("[::1]:50051", rank) for rank in (0, 2)] == ["[::1]:50051", "[::1]:50053"]
    assert address_of("127.0.0.1:0", 3) == "127.0.0.1:0"
    with pytest.raises(ValueError, match="write host:port"):
        TensorOptions.of(config_of(peers=["10.0.0.1"]))
    for wrong in ("50051", "host:", "host:http"):
        with pytest.raises(ValueError, match="write host:port"):
            address_of(wrong, 0)


def _window() -> PoolLayout:
    return uniform_layout(group_of(GroupKind.SLIDING_WINDOW, window_tokens=64), 2 * 32 * 64 * 2)


def test_tensors_that_may_wait_for_others_to_leave_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for store_bytes, warned in ((16 << 16, False), (15 << 16, True)):
        config = config_of(part_tokens=256, store_bytes=store_bytes)
        check(config, TensorOptions.of(config), FULL)
        assert any("take 2 pages" in record.message for record in caplog.records) is warned


@pytest.mark.parametrize(
    ("fields", "layout", "extra", "why"),
    [
        ({"pipeline_parallel_size": 2}, FULL, {}, "2 pipeline stages"),
        ({"data_parallel_size": 2}, FULL, {}, "2 replicas"),
        ({"nnodes": 2}, FULL, {}, "2 hosts"),
        ({"tensor_parallel_size": 2}, FULL, {}, "with port 0"),
        ({}, FULL, {"part_tokens": 48}, "part_tokens"),
        ({}, FULL, {"part_tokens": 0}, "part_tokens"),
        ({}, FULL, {"layers_per_tensor": 0}, "layers_per_tensor"),
        ({}, FULL, {"part_tokens": 256, "store_bytes": 1 << 16}, "take 2 pages"),
        ({}, _window(), {}, "all have full attention"),
    ],
)
def test_an_engine_that_is_not_served_does_not_start(
    fields: dict[str, int], layout: PoolLayout, extra: dict[str, Any], why: str
) -> None:
    config = config_of(**extra)
    vars(config.parallel_config).update(fields)
    with pytest.raises(ValueError, match=rf"{why}.*To do: "):
        check(config, TensorOptions.of(config), layout)


def test_an_engine_with_speculation_does_not_start() -> None:
    config = config_of()
    config.speculative_config = object()
    with pytest.raises(ValueError, match="without speculation"):
        check(config, TensorOptions.of(config), FULL)


def test_several_ranks_with_a_fixed_port_start() -> None:
    config = config_of(listen="127.0.0.1:50051")
    config.parallel_config.tensor_parallel_size = 2
    check(config, TensorOptions.of(config), FULL)


def test_a_buffer_on_the_host_and_a_store_on_the_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current_platform, "device_type", "cuda")
    config = config_of(store_on_device=True)
    config.kv_transfer_config.kv_buffer_device = "cuda"
    assert TensorOptions.of(config).store_on_device
    config.kv_transfer_config.kv_buffer_device = "cpu"
    with pytest.raises(ValueError, match="set one of them"):
        TensorOptions.of(config)
    config.kv_transfer_config.kv_connector_extra_config["store_on_device"] = False
    assert not TensorOptions.of(config).store_on_device


def test_vllm_is_asked_to_come_by_between_layers() -> None:
    assert KVGrpcConnector.requires_piecewise_for_cudagraph({"mode": "tensors"})
    assert not KVGrpcConnector.requires_piecewise_for_cudagraph({"mode": "push"})
