"""vLLM servers where P pushes, behind routers without kvgrpc: vllm-router, which runs the legs one after the other, and
vLLM's own proxy for pushes, which sends both at once under one X-Request-Id and without a transfer id.
"""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import BLOCK_TOKENS, MAX_TOKENS, PREFILL, START_S, prompt_of, wait_until
from tests.vllm.servers import MODEL, Server, healthy, new_server, ours, serving, usual_router

Servers = tuple[Server, Server]
FLAGS = ("--max-model-len", "2048", "--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", "400")


@pytest.fixture(scope="module", params=["auto", "push"])
def servers(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[Servers]:
    """Yields P in that mode, and D, which computes what does not come."""
    p, d = new_server("P"), new_server("D")
    computes = {**ours(d), "kv_load_failure_policy": "recompute"}
    with (
        serving(p, 0, model_folder, ours(p, mode=request.param), FLAGS, KVGRPC_LIMITS_ANNOUNCE_WAIT_S="5"),
        serving(d, 1, model_folder, computes, FLAGS),
    ):
        for server in (p, d):
            wait_until(lambda s=server: healthy(s.url), timeout_s=START_S)  # type: ignore[misc]
        yield p, d


def ask(url: str, prompt: list[int], request_id: str = "", **more: Any) -> Any:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    headers = {"content-type": "application/json"} | ({"X-Request-Id": request_id} if request_id else {})
    data = json.dumps({**body, "return_token_ids": True, **more}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", data, headers), timeout=60) as answer:
        return json.load(answer)


def tokens_of(answer: Any) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def received(server: Server) -> float:
    return server.counted("vllm:kvgrpc_received_tokens_total")


def at_rest(servers: Servers) -> None:
    for server in servers:
        wait_until(lambda s=server: s.held() == {}, server.held)  # type: ignore[misc]


def both_legs(p: Server, d: Server, prompt: list[int], **prefill: Any) -> tuple[Any, list[int]]:
    """Sends both legs, with `prefill` for P alone, like vLLM's proxy. Returns P's answer or error, and D's tokens."""
    host, _, port = p.lead.rpartition(":")
    where = {"remote_engine_id": p.name, "remote_host": host, "remote_port": int(port), "tp_size": 1, "pp_size": 1}
    name = os.urandom(16).hex()
    decode = {"do_remote_decode": False, "do_remote_prefill": True, "remote_request_id": name, **where}
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(ask, p.url, prompt, name, **{"max_tokens": 1, "kv_transfer_params": PREFILL, **prefill})
        second = threads.submit(ask, d.url, prompt, name, kv_transfer_params=decode)
        return first.exception() or first.result(), tokens_of(second.result())


def test_a_router_that_runs_one_leg_after_the_other_moves_the_kv(servers: Servers, model_folder: Path) -> None:
    p, d = servers
    with usual_router(*servers, model_folder / "router.log") as url:
        for seed, length in enumerate([200, 20, 900]):
            prompt, before = prompt_of(length, 300 + seed), received(d)
            tokens = tokens_of(ask(url, prompt))
            assert tokens == tokens_of(ask(p.url, prompt))
            assert received(d) - before == length
    at_rest(servers)


def test_both_legs_at_once_under_one_request_id_move_the_kv(servers: Servers) -> None:
    p, d = servers
    for seed, length in enumerate([200, 20, 900]):
        prompt, before = prompt_of(length, 310 + seed), received(d)
        _, tokens = both_legs(p, d, prompt)
        assert received(d) - before == length
        assert tokens == tokens_of(ask(p.url, prompt))
    at_rest(servers)


def test_decode_computes_what_prefill_refuses_by_its_own_api(servers: Servers) -> None:
    p, d = servers
    prompt, before = prompt_of(150, 320), received(d)
    error, tokens = both_legs(p, d, prompt, temperature=-1.0)
    assert isinstance(error, urllib.error.HTTPError)
    assert error.code == 400
    assert received(d) == before
    assert tokens == tokens_of(ask(p.url, prompt))
    at_rest(servers)
