"""The counts of `stats` as Prometheus metrics of vLLM: under kvgrpc's names, and under the names that dashboards for
vLLM's NixlConnector chart, if these mean the same.
"""

from collections.abc import Iterator
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from kvgrpc.errors import Reason
from kvgrpc.integrations.vllm.stats import COUNTERS, RECEIVE, SERIES

_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_BYTES = tuple(2.0**power for power in range(11, 35, 2))
_COUNTS = (10, 20, 30, 50, 75, 100, 200, 400, 1_000, 2_000, 4_000, 10_000, 20_000, 50_000)
BUCKETS: dict[str, tuple[float, ...]] = {
    "transfer_time_seconds": _S,
    "post_time_seconds": _S,
    "transfer_bytes": _BYTES,
    "transfer_descriptors": _COUNTS,
    "wait_time_seconds": (*_S, 10.0, 30.0, 60.0, 120.0),
}
"""Buckets by series; those of NixlConnector, if it has the metric."""
NIXL_SERIES = {
    "transfer_time_seconds": "vllm:nixl_xfer_time_seconds",
    "post_time_seconds": "vllm:nixl_post_time_seconds",
    "transfer_bytes": "vllm:nixl_bytes_transferred",
    "transfer_descriptors": "vllm:nixl_num_descriptors",
}
NIXL_FAILED, NIXL_EXPIRED = "vllm:nixl_num_failed_transfers", "vllm:nixl_num_kv_expired_reqs"
_ON_THE_WAY = """
INCOMPATIBLE_POOLS PROTOCOL_UNSUPPORTED NO_DATA_PATH NO_HANDSHAKE DIAL_REFUSED PEER_UNREACHABLE PEER_LOST PEER_FAILED
INCARNATION_CHANGED MEMORY_CHANGED QUEUE_TIMEOUT TRANSFER_TIMEOUT SETTLE_TIMEOUT DEADLINE ENGINE_LOST DATA_PATH_FAILED
CHECKSUM_MISMATCH INTERNAL INTERNAL_DEFECT
"""
ON_THE_WAY = frozenset(map(Reason, _ON_THE_WAY.split()))
"""Reasons that NixlConnector counts as failed transfers and handshakes: not expiry, release or what does not fit."""

_PerEngine = dict[int, Any]


class PromMetrics(KVConnectorPromMetrics):
    """The metrics, with one set for each engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labels: list[str], values: dict[int, list[object]]) -> None:
        super().__init__(vllm_config, metric_types, labels, values)
        self._values = values
        self._counters = {name: [self._counter(f"vllm:kvgrpc_{name}", about)] for name, about in COUNTERS.items()}
        self._series = {name: [self._histogram(f"vllm:kvgrpc_{name}", name)] for name in SERIES}
        about = "Requests whose KV did not come or go, by direction and reason; those that were cancelled among them."
        self._failures = self._counter_cls("vllm:kvgrpc_failures", about, [*labels, "direction", "reason"])
        for name, theirs in NIXL_SERIES.items():
            self._series[name].append(self._histogram(theirs, name))
        self._counters["expired"].append(self._counter(NIXL_EXPIRED, COUNTERS["expired"]))
        self._failed = self._counter(NIXL_FAILED, "Transfers that failed on the way.")

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, metrics in self._counters.items():
            for metric in metrics:
                metric[engine_idx].inc(transfer_stats_data.get(name, 0))
        for name, values in transfer_stats_data.get("series", {}).items():
            for metric in self._series[name]:
                for value in values:
                    metric[engine_idx].observe(value)
        for direction, reason, count in _rows(transfer_stats_data.get("failures", {})):
            self._failures.labels(*self._values[engine_idx], direction, reason).inc(count)
            if direction == RECEIVE and reason in ON_THE_WAY:
                self._failed[engine_idx].inc(count)

    def _counter(self, name: str, about: str) -> _PerEngine:
        made = self._counter_cls(name, about, self._labelnames)
        return {engine: made.labels(*of) for engine, of in self._values.items()}

    def _histogram(self, name: str, of: str) -> _PerEngine:
        made = self._histogram_cls(name, SERIES[of], self._labelnames, buckets=BUCKETS[of])
        return {engine: made.labels(*of) for engine, of in self._values.items()}


def _rows(failures: dict[str, dict[str, int]]) -> Iterator[tuple[str, str, int]]:
    for direction, reasons in failures.items():
        for reason, count in reasons.items():
            yield direction, reason, count
