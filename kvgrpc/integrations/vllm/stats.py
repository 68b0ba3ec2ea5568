"""What vLLM's log and its Prometheus metrics say of kvgrpc's transfers. Those of the lead itself say more."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvgrpc.errors import Reason

if TYPE_CHECKING:
    from kvgrpc.core.policy.values import Loss, SendEnded

COUNTERS = {
    "received": "Requests whose KV was received.",
    "received_tokens": "Tokens whose KV was received.",
    "lost": "Requests whose KV did not come.",
    "sent": "Requests whose KV was handed over and is done with.",
    "unsent": "Requests whose KV was handed over in vain.",
    "reclaimed": "Of those, the ones whose blocks were needed before anyone came for them.",
    "refused": "Requests whose kv_transfer_params asked for nothing that can be done.",
}
LOST_BY = "lost_by_"
"""Begins the name of the count of each reason for which KV did not come."""


class KVGrpcStats(KVConnectorStats):
    """Counts of one interval."""

    def __init__(self, data: Mapping[str, int] | None = None) -> None:
        super().__init__(data=dict.fromkeys(COUNTERS, 0) | dict(data or {}))

    def received(self, tokens: int) -> None:
        """The KV of so many tokens came."""
        self.data["received"] += 1
        self.data["received_tokens"] += tokens

    def lost(self, loss: "Loss") -> None:
        """The KV of a request did not come."""
        by = LOST_BY + loss.reason.value
        self.data["lost"] += 1
        self.data[by] = self.data.get(by, 0) + 1

    def sent(self, news: "SendEnded") -> None:
        """Blocks came back."""
        self.data["sent" if news.loss is None else "unsent"] += 1
        self.data["reclaimed"] += news.loss is not None and news.loss.reason is Reason.LEASE_RECLAIMED

    def refused(self) -> None:
        """Params were of no use."""
        self.data["refused"] += 1

    def take(self) -> "KVGrpcStats | None":
        """The counts so far, which begin anew; None: nothing happened."""
        if self.is_empty():
            return None
        taken = KVGrpcStats(self.data)
        self.reset()
        return taken

    def reset(self) -> None:
        self.data = dict.fromkeys(COUNTERS, 0)

    def aggregate(self, other: KVConnectorStats) -> "KVGrpcStats":
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not any(self.data.values())


class PromMetrics(KVConnectorPromMetrics):
    """The counts as vllm:kvgrpc_*_total. vllm:kvgrpc_lost_by_reason_total has the reason as a label."""

    def __init__(self, vllm_config: Any, metric_types: Any, labels: list[str], values: dict[int, list[object]]) -> None:
        super().__init__(vllm_config, metric_types, labels, values)
        made = {name: self._counter_cls(f"vllm:kvgrpc_{name}", about, labels) for name, about in COUNTERS.items()}
        self._counters = {
            name: {engine: counter.labels(*of) for engine, of in values.items()} for name, counter in made.items()
        }
        about = "Requests whose KV did not come, by the reason."
        self._lost = self._counter_cls("vllm:kvgrpc_lost_by_reason", about, [*labels, "reason"])

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(count)
            else:
                self._lost.labels(*self.per_engine_labelvalues[engine_idx], name.removeprefix(LOST_BY)).inc(count)
