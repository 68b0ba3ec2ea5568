"""Idle engines learn at once that blocks came back, and cost nothing until then."""

import os
import signal
import time
from pathlib import Path

from kvgrpc.client import connect_sync
from tests.vllm.engines import LEAD, PREFILL, prompt_of, pushed, wait_until
from tests.vllm.servers import Server
from tests.vllm.telemetry.conftest import Servers
from tests.vllm.telemetry.legs import asked

CORE = "VLLM::EngineCore"
WATCHED_S = 3.0
IDLE_SHARE = 0.1
"""Maximum share of a processor. An engine that steps all the time takes ten times as much."""


def usage(server: Server) -> float:
    return server.counted("vllm:kv_cache_usage_perc")


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def handed_over(server: Server, seed: int) -> None:
    """Hands over a prompt that nobody fetches yet."""
    params = {**PREFILL, "kvgrpc_intent": {"ttl": "600s", "firmTtl": "600s"}}
    asked(server, prompt_of(300, seed), max_tokens=1, kv_transfer_params=params)
    wait_until(lambda: usage(server) > 0, lambda: "the gauge does not show what is held")


def let_go(server: Server) -> None:
    """Releases all leases, like a router that no longer needs what it handed over."""
    with connect_sync(server.lead) as lead:
        for lease in lead.list_leases().leases:
            lead.release_lease(lease.lease_id)


def test_blocks_that_are_released_are_free_at_once_though_no_request_comes(servers: Servers) -> None:
    p, _ = servers
    handed_over(p, 500)
    let_go(p)
    wait_until(lambda: usage(p) == 0, lambda: usage(p))


def test_an_engine_whose_blocks_may_be_read_sleeps(servers: Servers) -> None:
    p, _ = servers
    handed_over(p, 501)
    (core,) = p.tree(CORE)
    began, spent = time.monotonic(), processor_s(core)
    wait_until(lambda: time.monotonic() - began > WATCHED_S)
    assert processor_s(core) - spent < IDLE_SHARE * (time.monotonic() - began)
    let_go(p)
    wait_until(lambda: usage(p) == 0, lambda: usage(p))


def test_a_prefill_hears_of_its_push_when_decode_has_it(servers: Servers) -> None:
    p, d = servers
    prompt, key = prompt_of(300, 502), os.urandom(16)
    asked(p, prompt, max_tokens=1, kv_transfer_params={**PREFILL, **pushed(key)})
    assert usage(p) > 0
    target = {"do_remote_decode": False, "do_remote_prefill": True, **pushed(key, p.lead)}
    asked(d, prompt, kv_transfer_params=target)
    wait_until(lambda: (usage(p), usage(d)) == (0, 0), lambda: (usage(p), usage(d)))


def test_an_engine_that_lost_its_lead_while_it_slept_has_its_blocks_again(servers: Servers) -> None:
    p, _ = servers
    handed_over(p, 503)
    (lead,) = p.tree(LEAD)
    os.kill(lead, signal.SIGKILL)
    wait_until(lambda: usage(p) == 0, lambda: usage(p))
