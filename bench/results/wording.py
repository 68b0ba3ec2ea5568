"""Says figures in a user's words."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from bench.results.pulls import Run

_WORDS = {
    "authorization_us": "telling a caller's roles, microseconds",
    "busy_5ms_completion_ms_p50": "last byte to woken waiter, beside a busy thread at Python's own 5 ms, median ms",
    "busy_5ms_one_block_pull_ms_p50": "one pull beside a busy thread at Python's own 5 ms, median ms",
    "coalescing_ratio": "speed of contiguous blocks, of raw NIXL block by block",
    "completion_to_waiter_ms_p50": "last byte to woken waiter, median ms",
    "completion_to_waiter_ms_p50_busy": "last byte to woken waiter, beside a busy thread, median ms",
    "control_1_ms": "processor time of both leads alone, a push of one block, ms",
    "control_8192_ms": "processor time of both leads alone, a push of many blocks, ms",
    "control_contiguous_ms": "processor time of both leads alone, many contiguous blocks, ms",
    "control_ms": "control, ms",
    "control_token_ids_ms": "processor time of both leads alone, many blocks with token ids, ms",
    "core_push_us": "processor time of both cores for a push, microseconds",
    "embedded_completion_to_waiter_ms_p50": "last byte to woken waiter, server in the engine's process, median ms",
    "embedded_one_block_pull_ms_p50": "one pull, server in the engine's process, median ms",
    "empty_call_ms_p50": "an empty call, median ms",
    "empty_stream_ms_p50": "an empty question over a stream, median ms",
    "full_ratio": "speed into a full store, of one with room",
    "gbps": "GB/s",
    "gloo": "raw Gloo",
    "idle_core_percent": "an idle server, percent of a core",
    "lease_cost_ratio_100k": "one lease with 100,000 alive, of one with 1,000",
    "lease_us": "one lease granted, renewed and expired, microseconds",
    "memcpy_whole": "memcpy of the whole pool",
    "memcpy_whole_gbps": "memcpy of the whole pool, GB/s",
    "metrics_ratio": "processor time of a pull with metrics, of one without",
    "nixl_tcp": "raw NIXL over TCP",
    "one_block_pull_empty_ms": "the messages of one pull when nobody does anything with them, ms",
    "one_block_pull_ms_p50": "one pull, median ms",
    "one_block_pull_ms_p50_busy": "one pull beside a busy thread, median ms",
    "one_block_push_ms_p50": "one push, median ms",
    "planning_ms": "planning, ms",
    "polling_ratio_one_block_pull": "time of one pull, of gRPC's own way to wait",
    "polling_ratio_processor": "processor time of a pull, of gRPC's own way to wait",
    "polling_ratio_pulls_per_s": "pulls a second, of gRPC's own way to wait",
    "private_window_gbps": "pulls over window, GB/s",
    "private_window_ratio_shm": "speed over window, of shm",
    "pulls_per_s": "pulls a second, many at once",
    "ratio_at_once": "speed with checksums at once, of without",
    "ratio_base": "of a pull or raw NIXL",
    "ratio_copies": "of the copies alone",
    "ratio_gloo": "of raw Gloo",
    "ratio_memcpy": "of memcpy",
    "ratio_nixl_tcp": "of raw NIXL over TCP",
    "ratio_raw_nixl": "of raw NIXL",
    "ratio_tp2_tp1": "speed of two ranks to two, of one to one",
    "ratio_without": "speed with checksums, of without",
    "raw_nixl": "raw NIXL",
    "raw_nixl READ": "raw NIXL READ",
    "raw_nixl WRITE": "raw NIXL WRITE",
    "renew_1000_ms": "renewing 1,000 leases, ms",
    "rested_pull_ms_p50": "one pull after 30 ms of rest, median ms",
    "rested_pull_ratio": "one pull after 30 ms of rest, of the next one",
    "scrape_10000_ms": "metrics read with 10,000 leases, ms",
    "session_one_block_push_ms_p50": "one push between attached engines, median ms",
    "tls_call_ms_p50": "the lightest call with TLS, median ms",
    "tls_call_ratio": "time of the lightest call with TLS, of without",
    "tls_pull_ms_p50": "one pull with TLS, median ms",
    "tls_pull_ratio": "time of one pull with TLS, of without",
    "tls_pulls_per_s": "pulls a second with TLS, many at once",
    "tls_rate_ratio": "pulls a second with TLS, of without",
    "tracing_1_percent_ratio": "processor time of a pull, one in a hundred traced, of none",
    "tracing_100_percent_ratio": "processor time of a pull, all traced, of none",
    "tracing_off_ratio": "processor time of a call with a trace that nobody records, of one without",
    "unary_ratio_empty": "time of the lightest call, of an empty one",
    "visible_layerwise_ms": "wait after the prefill, layer by layer, ms",
    "visible_ratio": "wait after the prefill layer by layer, of pushed whole",
    "visible_whole_ms": "wait after the prefill, pushed whole, ms",
    "waiting_cost_ratio": "a push beside many that wait, of one beside few",
}
_PATTERNS = (
    (r"servers_(\d+)_ms", "processor time of both servers, a push of {} blocks, ms"),
    (r"rate_processor_ms_(\w+)", "processor time of a pull, many at once: {}, ms"),
    (r"processor_ms_(\w+)", "processor time of a pull or push: {}, ms"),
    (r"kernel_ms_(\w+)", "of that in the kernel: {}, ms"),
    (r"full_ratio(?: over |\.)(.+)", "speed into a full store over {}, of one with room"),
    (r"planning_ms(?: of |\.)(.+)", "planning {}, ms"),
)
_BESIDE = {
    "ratio_memcpy": "memcpy", "ratio_raw_nixl": "raw NIXL", "ratio_gloo": "raw Gloo",
    "ratio_nixl_tcp": "raw NIXL over TCP", "ratio_copies": "the copies alone",
}  # fmt: skip


def verdict(found: Run) -> Iterator[str]:
    """Yields a line for each data path: its range from the worst case to the best, also beside each baseline."""
    by_path: dict[str, list[dict[str, Any]]] = {}
    for case in found.to_json().get("cases", []):
        by_path.setdefault(case["datapath"], []).append(case)
    for path, cases in by_path.items():
        over = "one case" if len(cases) == 1 else f"{len(cases)} cases, worst to best"
        if "visible_ratio" in cases[0]:
            left = _range(cases, "visible_layerwise_ms", rises=False)
            ratio = _range(cases, "visible_ratio", rises=False)
            yield f"{path}, {over}: {left} ms to wait for after the prefill, {ratio} x as long as pushed whole"
            continue
        beside = [f"{_range(cases, name)} x {what}" for name, what in _baselines(cases) if _values(cases, name)]
        yield ", ".join([f"{path}, {over}: {_range(cases, 'gbps')} GB/s", *beside])


def _baselines(cases: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    base = "a pull of the same" if cases[0].get("base") == "pull" else "raw NIXL"
    return [("ratio_base", base), *_BESIDE.items()]


def _values(cases: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [case[name] for case in cases if case.get(name) is not None]


def _range(cases: Sequence[dict[str, Any]], name: str, *, rises: bool = True) -> str:
    """Returns the worst and the best of a figure; of one case, its figure."""
    values = sorted(_values(cases, name), reverse=not rises)
    worst, best = number(values[0]), number(values[-1])
    return worst if worst == best else f"{worst} to {best}"


def words(name: str) -> str:
    """Returns what a figure is, with its unit at the end."""
    name = name.removeprefix("details.")
    for pattern, text in _PATTERNS:
        if match := re.fullmatch(pattern, name):
            return text.format(match[1])
    return _WORDS.get(name, name.replace("_", " "))


def number(value: float) -> str:
    """Returns a figure with three digits that count, and never with an exponent."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.4f}"
