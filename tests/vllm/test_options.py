"""The options of kvgrpc in vLLM's configuration are documented."""

import dataclasses
import inspect
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler

from kvgrpc.config import PoolConfig
from kvgrpc.core.policy.values import ModeChoice, OnLoss
from kvgrpc.integrations.params import Defaults
from kvgrpc.integrations.vllm.connector import KVGrpcConnector
from kvgrpc.integrations.vllm.geometry import ORDERS
from kvgrpc.integrations.vllm.meeting import WorkerGreeting, agreed, kernels_of_groups
from kvgrpc.integrations.vllm.options import BlockOptions, choose_policy
from kvgrpc.integrations.vllm.prometheus import PromMetrics
from tests.docs.pages import DOCS, plain, section, tables

POOL = PoolConfig().layout()


def options_of(policy: str = "fail", replica: int = 0, **extra: Any) -> BlockOptions:
    transfer = SimpleNamespace(kv_connector_extra_config=extra, kv_load_failure_policy=policy)
    model = SimpleNamespace(model="llama", revision=None)
    parallel_config = SimpleNamespace(data_parallel_index=replica)
    config = SimpleNamespace(
        kv_transfer_config=transfer, model_config=model, max_in_flight_tokens=4096, parallel_config=parallel_config
    )
    return BlockOptions.of(config)


def test_every_option_is_documented_with_its_default() -> None:
    rows = {plain(row[0]): plain(row[1]) for row in tables(section(DOCS / "integrating.md", "## vLLM"))[0]}
    defaults = {field.name: field.default for field in dataclasses.fields(BlockOptions)} | vars(Defaults())
    elsewhere = {"defaults", "step_tokens", "pairing_secret"}
    assert rows.keys() == defaults.keys() - elsewhere
    said = {"mode": "auto", "on_loss": "recompute",
                "ttl_s": "the lead's", "firm_ttl_s": "the lead's", "offer_ttl_s": "0",
                "serve_flags": "none", "limits": "none", "pairing_secret_file": "none",
            "weights_revision": "model and revision", "proxy_ip": "none", "proxy_port": "none", "http_port": "none",
            "data_paths": '["cma", "nixl", "cuda_vmm", "collective"]'}  # fmt: skip
    assert rows == {name: said.get(name, str(defaults[name])) for name in rows}


def test_options_come_from_both_configurations_of_vllm() -> None:
    found = options_of("recompute", mode="push", data_paths=["nixl"], offer_ttl_s=9)
    assert (found.defaults.mode, found.defaults.offer_ttl_s) == (ModeChoice.PUSH, 9.0)
    assert (found.on_loss, found.data_paths) == (OnLoss.RECOMPUTE, ("nixl",))
    assert (found.weights_revision, found.step_tokens) == ("llama@", 4096)


def test_the_secret_that_engines_share_is_in_a_file_and_in_no_text(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("hunter2" * 5)
    found = options_of(pairing_secret_file=str(file))
    assert found.defaults.pairing_secret == b"hunter2" * 5
    assert "hunter2" not in repr(found)
    assert not any("hunter2" in flag for flag in found.lead_flags)
    assert options_of().defaults.pairing_secret == b""
    with pytest.raises(ValueError, match="pairing_secret_file"):
        options_of(pairing_secret_file=str(tmp_path / "none"))


def test_limits_of_the_lead_are_flags_of_its_own() -> None:
    made = options_of(data_paths=["nixl"], limits={"registration_timeout_s": 480, "announce_wait_s": 2.5})
    limits = ("--limit", "registration_timeout_s=480", "--limit", "announce_wait_s=2.5")
    assert made.lead_flags == ("--data-paths", "nixl", *limits)


@pytest.mark.parametrize(
    ("of_vllm", "stated", "chosen"),
    [
        ("fail", {}, "recompute"),
        ("recompute", {}, "recompute"),
        ("fail", {"on_loss": "fail"}, "fail"),
        ("fail", {"on_loss": "recompute"}, "recompute"),
    ],
)
def test_what_does_not_come_is_computed_unless_the_connector_is_told_to_fail(
    of_vllm: str, stated: dict[str, Any], chosen: str
) -> None:
    """vLLM's own key is `fail` by default."""
    transfer = SimpleNamespace(kv_connector_extra_config=stated, kv_load_failure_policy=of_vllm)
    for _ in range(2):  # a scheduler and a worker in one process share it
        choose_policy(transfer)
    assert transfer.kv_load_failure_policy == chosen
    assert options_of(chosen, **stated).on_loss is OnLoss(chosen)


@pytest.mark.parametrize("stated", ["fail", "despair"])
def test_policies_that_contradict_each_other_stop_the_start(stated: str) -> None:
    with pytest.raises(ValueError, match=stated):
        choose_policy(
            SimpleNamespace(kv_connector_extra_config={"on_loss": stated}, kv_load_failure_policy="recompute")
        )


def test_vllm_is_told_before_it_reads_its_policy() -> None:
    """vLLM makes its connector first."""
    source = inspect.getsource(VllmScheduler.__init__)
    assert source.index("create_connector") < source.index("kv_transfer_config.kv_load_failure_policy")


@pytest.mark.parametrize(
    "extra", [{"listne": "x"}, {"mode": "pusch"}, {"kv_recompute_threshold": 64}, {"proxy_ip": "10.0.0.1"}]
)
def test_what_is_unknown_stops_the_start(extra: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"listne|pusch|set `recompute_threshold_tokens`|http_port"):
        options_of(**extra)


@pytest.mark.parametrize(
    ("listen", "replica", "found"),
    [
        ("0.0.0.0:50051", 0, "0.0.0.0:50051"),
        ("[::1]:50051", 3, "[::1]:50054"),
        ("127.0.0.1:0", 3, "127.0.0.1:0"),
        ("127.0.0.1:00", 3, "127.0.0.1:0"),
    ],
)
def test_each_replica_listens_at_a_port_of_its_own(listen: str, replica: int, found: str) -> None:
    assert options_of(replica=replica, listen=listen, serve_flags=["--advertise", "10.0.0.1:0"]).listen == found


@pytest.mark.parametrize(
    "extra",
    [
        {"listen": "127.0.0.1:65535"},
        {"listen": "50051"},
        {"listen": "127.0.0.1:abc"},
        {"listen": "127.0.0.1:"},
        {"serve_flags": ["--advertise", "10.0.0.1:50051"]},
        {"serve_flags": ["--advertise=10.0.0.1:50051"]},
    ],
)
def test_replicas_that_would_share_an_address_stop_the_start(extra: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="data-parallel engine"):
        options_of(replica=1, **extra)


def test_each_replica_is_counted_by_itself() -> None:
    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    made = PromMetrics(SimpleNamespace(kv_transfer_config=None), kinds, ["engine"], {0: ["0"], 1: ["1"]})
    made.observe({"received": 2}, 1)
    found = [registry.get_sample_value("vllm:kvgrpc_received_total", {"engine": engine}) for engine in "01"]
    assert found == [0.0, 2.0]


def test_vllm_is_asked_for_a_layout_that_is_served_and_to_come_by_between_layers_that_go_one_by_one() -> None:
    assert KVGrpcConnector.get_required_kvcache_layout(SimpleNamespace()) in ORDERS
    for count in (0, 2):
        assert KVGrpcConnector.requires_piecewise_for_cudagraph({"layers_per_part": count}) is bool(count)


def test_what_comes_from_elsewhere_is_there_for_all_groups() -> None:
    """vLLM asks which groups were loaded, and would compute the others."""
    connector = object.__new__(KVGrpcConnector)
    connector._groups = [["full"], ["window"], ["state"]]
    assert connector.get_loaded_kv_cache_group_ids(SimpleNamespace()) == (0, 1, 2)


def test_whatever_role_an_engine_has_what_it_hands_over_is_delivered() -> None:
    """vLLM asks the connector, which by default answers with its role: a preempted prefill could leave without its
    KV.
    """
    connector = object.__new__(KVGrpcConnector)
    connector._kv_transfer_config = SimpleNamespace(is_kv_producer=False)
    assert not KVConnectorBase_V1.requires_kv_delivery.fget(connector)
    assert connector.requires_kv_delivery


def test_ranks_agree_on_how_they_compute_or_the_engine_does_not_start() -> None:
    usual, other = [[["CPU_ATTN", "amx", ""]]], [[["CPU_ATTN", "vec", ""]]]
    assert agreed([[WorkerGreeting("/a", usual, POOL), WorkerGreeting("/b", usual, POOL)]]) == [
        WorkerGreeting("/a", usual, POOL)
    ]
    what = r"of stage 1 ranks 0 and 1 differ in kernels\[0\]\[0\]\[1\]: amx and vec\. To do: "
    with pytest.raises(ValueError, match=what):
        agreed(
            [
                [WorkerGreeting("/a", usual, POOL)],
                [WorkerGreeting("/b", usual, POOL), WorkerGreeting("/c", other, POOL)],
            ]
        )
    one, two = POOL.total_bytes, 2 * POOL.total_bytes
    *others, last = POOL.regions
    unlike = replace(POOL, total_bytes=two, regions=(*others, replace(last, offset=one)))
    where = rf"layout\.regions\[{len(others)}\]\.offset: {last.offset} and {one}"
    what = rf"differ in {where}, layout\.total_bytes: {one} and {two}\. To do: "
    with pytest.raises(ValueError, match=what):
        agreed(
            [
                [
                    WorkerGreeting("/a", usual, POOL),
                    WorkerGreeting("/b", usual, POOL),
                    WorkerGreeting("/c", usual, unlike),
                ]
            ]
        )


def test_ranks_that_differ_in_much_are_named_with_the_first_that_differs() -> None:
    layers = [[[[f"kernel {number} of {name}"] for number in range(1000)]] for name in "ab"]
    what = r"kernels\[0\]\[0\]\[0\]: kernel 0 of a and kernel 0 of b, .*, …\. To do: "
    with pytest.raises(ValueError, match=what) as raised:
        agreed([[WorkerGreeting("/a", layers[0], POOL), WorkerGreeting("/b", layers[1], POOL)]])
    assert len(str(raised.value)) < 1000


def test_an_engine_has_the_kernels_of_all_its_stages_as_one_without_stages() -> None:
    window, full, draft = ["CPU_ATTN", "amx", ""], ["CPU_ATTN", "vec", ""], ["CPU_ATTN", "vec16", ""]
    whole = WorkerGreeting("/", [[window], [full, draft]], POOL)
    stages = [WorkerGreeting("/a", [[window], [full]], POOL), WorkerGreeting("/b", [[window], [full, draft]], POOL)]
    assert kernels_of_groups(stages) == kernels_of_groups([whole]) == [window, full, draft]
