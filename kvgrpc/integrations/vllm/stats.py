"""The counts of an engine's transfers, for vLLM's log and its Prometheus metrics (`prometheus`).

vLLM asks the scheduler's side after each step, and adds up the answers of an interval. The lead counts each transfer
over all ranks, so that no worker is asked.
"""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvgrpc.errors import Reason
from kvgrpc.integrations.vllm.silence import Silence

if TYPE_CHECKING:
    from kvgrpc.core.policy.values import Loss, SendEnded
    from kvgrpc.core.values.telemetry import MoveTelemetry

COUNTERS = {
    "received": "Requests whose KV was received.",
    "received_tokens": "Tokens whose KV was received.",
    "lost": "Requests whose KV did not come.",
    "sent": "Requests whose KV was handed over and is done with.",
    "unsent": "Requests whose KV was handed over in vain.",
    "reclaimed": "Of those, the ones whose blocks were needed before anyone came for them.",
    "expired": "Of those, the ones that nobody was done with when their lease or their registration ended.",
    "refused": "Requests whose kv_transfer_params asked for nothing that can be done.",
}
SERIES = {
    "transfer_time_seconds": "How long the bytes of a transfer took that this engine moved, of its slowest rank.",
    "post_time_seconds": "How long the data path was busy with submitting such a transfer.",
    "transfer_bytes": "Bytes of such a transfer, over all ranks.",
    "transfer_descriptors": "Runs of bytes that are contiguous at both engines, of such a transfer, over all ranks.",
    "wait_time_seconds": "How long a request waited for its KV, and for nothing else.",
}
RECEIVE, SEND = "receive", "send"
EXPIRED = frozenset({Reason.LEASE_EXPIRED, Reason.REGISTRATION_TIMEOUT})


class KVGrpcStats(KVConnectorStats):
    """The counts of one interval. `data`: each of COUNTERS; under "series" the values of each of SERIES; under
    "failures" the number of failed requests, by direction and reason.
    """

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(data=_empty() | dict(data or {}))
        self._waiting: dict[str, float] = {}
        """Time since which each request waits for its KV, by the monotonic clock."""
        self._silence = Silence()

    def waits(self, request_id: str) -> None:
        """Notes that a request waits for its KV from now on, and for nothing else."""
        self._waiting.setdefault(request_id, time.monotonic())

    def waited(self, request_id: str) -> None:
        """Notes that a request waits no longer: its KV came, or will not."""
        if (since := self._waiting.pop(request_id, None)) is not None:
            self._add("wait_time_seconds", time.monotonic() - since)

    def left(self, request_id: str) -> None:
        """Forgets a request that left while it waited."""
        self._waiting.pop(request_id, None)

    def received(self, tokens: int) -> None:
        """Counts a request that received the KV of `tokens` tokens."""
        self.data["received"] += 1
        self.data["received_tokens"] += tokens
        self._silence.moved()

    def lost(self, loss: "Loss") -> None:
        """Counts a request whose KV did not come."""
        self.data["lost"] += 1
        self._failed(RECEIVE, loss)

    def sent(self, news: "SendEnded") -> None:
        """Counts a hand-over whose blocks came back."""
        self.data["sent" if news.loss is None else "unsent"] += 1
        if news.loss is not None:
            self.data["reclaimed"] += news.loss.reason is Reason.LEASE_RECLAIMED
            self.data["expired"] += news.loss.reason in EXPIRED
            self._failed(SEND, news.loss)
        else:
            self._silence.moved()

    def gave(self, *, complete: bool) -> None:
        """Counts a prompt whose tensors were put, or kept for others: all of them, or not."""
        self.data["sent" if complete else "unsent"] += 1
        if complete:
            self._silence.moved()

    def moved(self, telemetry: "MoveTelemetry") -> None:
        """Counts a transfer whose bytes this engine's ranks moved."""
        self._add("transfer_time_seconds", telemetry.wire_s)
        self._add("post_time_seconds", telemetry.post_s)
        self._add("transfer_bytes", telemetry.nbytes)
        self._add("transfer_descriptors", telemetry.descriptors)

    def refused(self, why: str) -> None:
        """Counts params that were of no use."""
        self.data["refused"] += 1
        self._silence.in_vain(why)

    def unheard(self, why: str) -> None:
        """Notes that vLLM does not say what becomes of requests that ask for KV to move."""
        self._silence.in_vain(why)

    def take(self) -> "KVGrpcStats | None":
        """Returns the counts so far, and begins anew; None: nothing happened."""
        if self.is_empty():
            return None
        taken = KVGrpcStats(self.data)
        self.reset()
        return taken

    def reset(self) -> None:
        self.data = _empty()

    def aggregate(self, other: KVConnectorStats) -> "KVGrpcStats":
        for name in COUNTERS:
            self.data[name] += other.data[name]
        for name, values in other.data["series"].items():
            self.data["series"].setdefault(name, []).extend(values)
        for direction, reasons in other.data["failures"].items():
            mine = self.data["failures"].setdefault(direction, {})
            for reason, count in reasons.items():
                mine[reason] = mine.get(reason, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        counts: dict[str, int | float] = {name: self.data[name] for name in COUNTERS}
        series = {name: np.asarray(values) for name, values in self.data["series"].items()}
        if waits := self.data["series"].get("wait_time_seconds"):
            counts["Avg wait (ms)"] = round(float(np.mean(waits)) * 1e3, 3)
        if "transfer_bytes" not in series:
            return counts
        took_s, megabytes = series["transfer_time_seconds"], series["transfer_bytes"] / 2**20
        # The names are those that vLLM's log has for its own connector.
        return counts | {
            "Avg xfer time (ms)": round(float(took_s.mean()) * 1e3, 3),
            "P90 xfer time (ms)": round(float(np.percentile(took_s, 90)) * 1e3, 3),
            "Avg post time (ms)": round(float(series["post_time_seconds"].mean()) * 1e3, 3),
            "Avg MB per transfer": round(float(megabytes.mean()), 3),
            "Throughput (MB/s)": round(float(megabytes.sum() / max(took_s.sum(), 1e-9)), 3),
            "Avg number of descriptors": round(float(series["transfer_descriptors"].mean()), 1),
        }

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def _add(self, name: str, value: float) -> None:
        self.data["series"].setdefault(name, []).append(value)

    def _failed(self, direction: str, loss: "Loss") -> None:
        reasons = self.data["failures"].setdefault(direction, {})
        reasons[loss.reason.value] = reasons.get(loss.reason.value, 0) + 1
        self._silence.in_vain(f"{loss.reason}: {loss.message}")


def _empty() -> dict[str, Any]:
    return {**dict.fromkeys(COUNTERS, 0), "series": {}, "failures": {}}
