"""A server's Prometheus metrics of transfers, under kvgrpc's names and under those of NixlConnector."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.vllm.engines import BLOCK_TOKENS, PREFILL, prompt_of, pushed, wait_until
from tests.vllm.servers import Server
from tests.vllm.telemetry.conftest import Servers
from tests.vllm.telemetry.legs import asked

TOKEN_BYTES = 4 * 2 * 4 * 32 * 2
"""Bytes of a token's KV: layers, K and V, heads, dims, bytes of a number."""
SERIES = {
    "kvgrpc_transfer_time_seconds": "nixl_xfer_time_seconds",
    "kvgrpc_post_time_seconds": "nixl_post_time_seconds",
    "kvgrpc_transfer_bytes": "nixl_bytes_transferred",
    "kvgrpc_transfer_descriptors": "nixl_num_descriptors",
}
DECODE = {"do_remote_decode": False, "do_remote_prefill": True}


class Counted:
    """Growth of a server's metrics since it was made."""

    def __init__(self, server: Server) -> None:
        self._server, self._before = server, dict[str, float]()

    def __call__(self, metric: str, **labels: str) -> float:
        now = self._server.counted(f"vllm:{metric}", **labels)
        return now - self._before.setdefault(f"{metric}{labels}", 0.0)

    def since_now(self, *metrics: str) -> "Counted":
        for metric in metrics:
            self._before[f"{metric}{{}}"] = self._server.counted(f"vllm:{metric}")
        return self


ALL = [f"{name}_{what}" for pair in SERIES.items() for name in pair for what in ("count", "sum")] + [
    "kvgrpc_wait_time_seconds_count", "kvgrpc_expired_total", "kvgrpc_lost_total", "kvgrpc_unsent_total",
    "nixl_num_kv_expired_reqs_total", "nixl_num_failed_transfers_total", "kvgrpc_failures_total",
]  # fmt: skip


@pytest.fixture
def counted(servers: Servers) -> tuple[Counted, Counted]:
    p, d = servers
    for server in servers:  # earlier counts arrive when their blocks are free
        wait_until(lambda s=server: s.held() == {} and s.counted("vllm:kv_cache_usage_perc") == 0)  # type: ignore[misc]
    return Counted(p).since_now(*ALL), Counted(d).since_now(*ALL)


def check_moved(mover: Counted, other: Counted, tokens: int) -> None:
    """Checks that one transfer of this many tokens' blocks was counted, by the mover's engine only."""
    nbytes = -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS * TOKEN_BYTES
    wait_until(lambda: mover("kvgrpc_transfer_bytes_count") == 1)
    for ours, theirs in SERIES.items():
        for name in (ours, theirs):
            assert (mover(f"{name}_count"), other(f"{name}_count")) == (1, 0), name
        assert mover(f"{ours}_sum") == pytest.approx(mover(f"{theirs}_sum"))
    assert mover("kvgrpc_transfer_bytes_sum") == nbytes
    assert mover("kvgrpc_transfer_descriptors_sum") >= 1
    assert 0 < mover("kvgrpc_post_time_seconds_sum") <= mover("kvgrpc_transfer_time_seconds_sum")


def test_a_pull_is_counted_where_it_is_read(servers: Servers, counted: tuple[Counted, Counted]) -> None:
    p, d = servers
    prompt = prompt_of(200, 400)
    params = asked(p, prompt, max_tokens=1, kv_transfer_params=PREFILL)["kv_transfer_params"]
    asked(d, prompt, kv_transfer_params=params)
    at_p, at_d = counted
    check_moved(at_d, at_p, 200)
    assert at_d("kvgrpc_wait_time_seconds_count") == 1


def test_a_push_is_counted_where_its_bytes_were_moved(servers: Servers, counted: tuple[Counted, Counted]) -> None:
    """The destination reads by cma, so it counts."""
    p, d = servers
    prompt, key = prompt_of(300, 401), os.urandom(16)
    with ThreadPoolExecutor(2) as pool:
        target: dict[str, Any] = {**DECODE, **pushed(key, p.lead)}
        decode = pool.submit(asked, d, prompt, kv_transfer_params=target)
        asked(p, prompt, max_tokens=1, kv_transfer_params={**PREFILL, **pushed(key)})
        decode.result()
    at_p, at_d = counted
    check_moved(at_d, at_p, 300)


def test_what_expired_and_what_failed_is_counted_by_its_reason(
    servers: Servers, counted: tuple[Counted, Counted]
) -> None:
    p, d = servers
    at_p, at_d = counted
    prompt, ask = prompt_of(100, 402), {**PREFILL, "kvgrpc_intent": {"ttl": "0.2s"}}
    late = asked(p, prompt, max_tokens=1, kv_transfer_params=ask)["kv_transfer_params"]
    wait_until(lambda: at_p("kvgrpc_expired_total") == 1)
    assert at_p("nixl_num_kv_expired_reqs_total") == at_p("kvgrpc_unsent_total") == 1
    assert p.counted("vllm:kvgrpc_failures_total", direction="send", reason="LEASE_EXPIRED") >= 1
    asked(d, prompt, kv_transfer_params=late)
    wait_until(lambda: at_d("kvgrpc_lost_total") == 1)
    assert d.counted("vllm:kvgrpc_failures_total", direction="receive", reason="LEASE_EXPIRED") >= 1
    assert (at_d("nixl_num_failed_transfers_total"), at_d("kvgrpc_failures_total")) == (0, 1)
