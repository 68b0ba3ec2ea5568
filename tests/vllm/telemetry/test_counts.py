"""The connector's counts: how they add up, and their names."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvgrpc.core.policy.values import Loss, SendEnded
from kvgrpc.core.values.telemetry import MoveTelemetry
from kvgrpc.errors import NextStep, Reason
from kvgrpc.integrations.vllm.prometheus import NIXL_EXPIRED, NIXL_FAILED, NIXL_SERIES, PromMetrics
from kvgrpc.integrations.vllm.stats import COUNTERS, SERIES, KVGrpcStats
from tests.docs.pages import DOCS, plain, section, tables
from tests.vllm.cores import PROMPT
from tests.vllm.tensors.sides import TABLE, held, side_of, taking

MOVED = MoveTelemetry(nbytes=2**20, descriptors=8, wire_s=0.5, post_s=0.25)


def loss(reason: Reason) -> Loss:
    return Loss(reason, "why", NextStep.RECOMPUTE)


def interval(reason: Reason = Reason.PEER_LOST) -> KVGrpcStats:
    """Returns the counts of a transfer, a load that came, one that did not, and a hand-over that expired."""
    stats = KVGrpcStats()
    stats.moved(MOVED)
    stats.waits("a")
    stats.waited("a")
    stats.received(40)
    stats.lost(loss(reason))
    stats.sent(SendEnded("c", loss(Reason.LEASE_EXPIRED)))
    taken = stats.take()
    assert taken is not None
    assert stats.take() is None, "it begins anew"
    return taken


def test_counts_of_steps_add_up_to_those_of_an_interval() -> None:
    """vLLM sends such counts between its processes."""
    whole = KVGrpcStats(data=interval().to_dict()).aggregate(KVGrpcStats(data=interval().to_dict()))
    assert whole.data["failures"] == {"receive": {"PEER_LOST": 2}, "send": {"LEASE_EXPIRED": 2}}
    expected = {"received": 2, "received_tokens": 80, "lost": 2, "unsent": 2, "expired": 2}
    assert {name: count for name, count in whole.data.items() if isinstance(count, int) and count} == expected
    said = whole.reduce()
    assert (said["Avg xfer time (ms)"], said["Avg post time (ms)"], said["Throughput (MB/s)"]) == (500.0, 250.0, 2.0)
    assert (said["Avg MB per transfer"], said["Avg number of descriptors"]) == (1.0, 8.0)
    assert "Avg wait (ms)" in said
    assert KVGrpcStats().reduce() == dict.fromkeys(COUNTERS, 0)


def test_a_request_for_tensors_waits_from_the_moment_on_that_they_are_asked_for() -> None:
    side = side_of()
    first, other = taking("d"), taking("e")
    for request in (first, other):
        side.arrived(request)
        assert side.match(request, 0) == (None, False)
    held(side, "d", 3)
    assert side.match(first, 0) == (len(PROMPT) - 1, False)
    side.allocated(first, (TABLE,), len(PROMPT) - 1)
    side.finished(other)
    (waited_s,) = side.stats.data["series"]["wait_time_seconds"]
    assert waited_s > 0


def made() -> tuple[PromMetrics, CollectorRegistry]:
    """Returns metrics and their registry."""
    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=None))
    return PromMetrics(config, kinds, ["engine"], {0: ["0"], 1: ["1"]}), registry


def value(registry: CollectorRegistry, name: str, **labels: str) -> Any:
    return registry.get_sample_value(name, {"engine": "1", **labels})


@pytest.mark.parametrize(("reason", "on_the_way"), [(Reason.PEER_LOST, 1), (Reason.CONTENT_MISMATCH, 0)])
def test_an_interval_is_observed_under_both_names(reason: Reason, on_the_way: int) -> None:
    metrics, registry = made()
    metrics.observe(interval(reason).to_dict(), 1)
    sums = {"transfer_time_seconds": 0.5, "post_time_seconds": 0.25, "transfer_bytes": 2**20, "transfer_descriptors": 8}
    for name, theirs in NIXL_SERIES.items():
        assert value(registry, f"vllm:kvgrpc_{name}_sum") == value(registry, f"{theirs}_sum") == sums[name]
    assert value(registry, "vllm:kvgrpc_expired_total") == value(registry, f"{NIXL_EXPIRED}_total") == 1
    assert value(registry, f"{NIXL_FAILED}_total") == on_the_way
    assert value(registry, "vllm:kvgrpc_failures_total", direction="receive", reason=reason.value) == 1
    assert value(registry, "vllm:kvgrpc_wait_time_seconds_count") == 1


def test_every_metric_is_documented() -> None:
    rows = tables(section(DOCS / "integrating.md", "### Metrics and traces"))[0]
    ours = {*SERIES, *(f"{name}_total" for name in (*COUNTERS, "failures"))}
    theirs = {*NIXL_SERIES.values(), f"{NIXL_EXPIRED}_total", f"{NIXL_FAILED}_total"}
    assert {plain(row[0]) for row in rows} - {""} == {f"vllm:kvgrpc_{name}" for name in ours}
    assert {plain(row[1]) for row in rows} - {""} == theirs
    of = {plain(row[0]): plain(row[1]) for row in rows}
    assert all(of[f"vllm:kvgrpc_{name}"] == nixl for name, nixl in NIXL_SERIES.items())
