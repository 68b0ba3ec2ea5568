"""Two vLLM servers with two connectors each: ours, beside one that knows only a single group of layers. vLLM's
MultiConnector then calls the hooks for engines with one group, and asks the two connectors in order.
"""

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import BLOCK_TOKENS, LEAD, MAX_TOKENS, PREFILL, START_S, prompt_of, wait_until
from tests.vllm.servers import MODEL, Server, healthy, new_server, ours, serving, usual_router

Servers = tuple[Server, Server]
FLAGS = ("--max-model-len", "2048", "--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", "400")
OURS_FIRST, THEIRS_FIRST, ALONE = "ours first", "theirs first", "alone"


def beside(server: Server, folder: Path, order: str, **extra: Any) -> dict[str, Any]:
    """Returns a configuration with our connector and vLLM's example, which keeps prompts in files of this server. If
    ours is ALONE, vLLM calls the hooks for several groups.
    """
    mine = {name: value for name, value in ours(server, **extra).items() if name != "engine_id"}
    kept = {"shared_storage_path": str(folder / f"kept-{server.port}")}
    theirs = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": kept}
    connectors = {OURS_FIRST: [mine, theirs], THEIRS_FIRST: [theirs, mine], ALONE: [mine]}[order]
    more = {"connectors": connectors}
    multi = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "engine_id": server.name}
    return {**multi, "kv_connector_extra_config": more}


def two_servers(folder: Path, order: str, **extra: Any) -> Iterator[Servers]:
    """Yields P and D, which by vLLM's default fail the requests of failed loads."""
    p, d = new_server("P"), new_server("D")
    more = {"VLLM_SERVER_DEV_MODE": "1", "KVGRPC_LIMITS_PEER_GRACE_S": "2"}
    with (
        serving(p, 0, folder, beside(p, folder, order, **extra), FLAGS, **more),
        serving(d, 1, folder, beside(d, folder, order, **extra), FLAGS, **more),
    ):
        for server in (p, d):
            wait_until(lambda s=server: healthy(s.url), timeout_s=START_S)  # type: ignore[misc]
        yield p, d


@pytest.fixture(scope="module", params=[OURS_FIRST, THEIRS_FIRST, ALONE])
def order(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def servers(order: str, model_folder: Path) -> Iterator[Servers]:
    yield from two_servers(model_folder, order)


@pytest.fixture(scope="module")
def tensor_servers(model_folder: Path) -> Iterator[Servers]:
    yield from two_servers(model_folder, OURS_FIRST, mode="tensors")


def ask(url: str, prompt: list[int], **more: Any) -> Any:
    flags = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body = {"model": MODEL, "prompt": prompt, "max_tokens": MAX_TOKENS, **flags}
    data, headers = json.dumps({**body, **more}).encode(), {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", data, headers), timeout=60) as answer:
        return json.load(answer)


def tokens_of(answer: Any) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def prefilled(server: Server, prompt: list[int], **intent: Any) -> Any:
    """Returns the params that P's answer has for D."""
    params = {**PREFILL, "kvgrpc_intent": intent} if intent else PREFILL
    return ask(server.url, prompt, max_tokens=1, kv_transfer_params=params)["kv_transfer_params"]


def forgets(server: Server) -> None:
    """Empties the server's prefix cache, but not the other connector's files."""
    request = urllib.request.Request(f"{server.url}/reset_prefix_cache", b"", method="POST")
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 200


def received(server: Server) -> float:
    return server.counted("vllm:kvgrpc_received_tokens_total")


def at_rest(servers: Servers) -> None:
    for server in servers:
        wait_until(lambda s=server: s.held() == {}, server.held)  # type: ignore[misc]


def moves(servers: Servers, log: Path, seed: int, *, computed: int = 0) -> None:
    """Checks that a router moves prompts from P to D, all of their tokens but the `computed` ones."""
    p, d = servers
    with usual_router(*servers, log) as url:
        for number, length in enumerate([200, 20, 900]):
            prompt, before = prompt_of(length, seed + number), received(d)
            tokens = tokens_of(ask(url, prompt))
            wait_until(lambda b=before, n=length: received(d) - b == n - computed, lambda: received(d))  # type: ignore[misc]
            assert tokens == tokens_of(ask(p.url, prompt))


def test_the_kv_moves(servers: Servers, model_folder: Path) -> None:
    moves(servers, model_folder / "beside-router.log", 700)
    at_rest(servers)


def test_tensors_move(tensor_servers: Servers, model_folder: Path) -> None:
    moves(tensor_servers, model_folder / "beside-tensors.log", 710, computed=1)


def test_the_first_one_that_has_a_prompt_brings_it_and_its_source_is_let_go_in_any_case(
    servers: Servers, order: str
) -> None:
    p, d = servers
    prompt = prompt_of(300, 720)
    expected = tokens_of(ask(d.url, prompt))  # the other connector keeps it
    forgets(d)
    params, before = prefilled(p, prompt), received(d)
    assert tokens_of(ask(d.url, prompt, kv_transfer_params=params)) == expected
    assert received(d) - before == (0 if order == THEIRS_FIRST else 300)
    at_rest(servers)


def test_what_is_lost_before_it_is_waited_for_is_computed(servers: Servers) -> None:
    p, d = servers
    prompt, lost = prompt_of(150, 730), d.counted("vllm:kvgrpc_lost_total")
    params = prefilled(p, prompt, ttl="0.2s")
    wait_until(lambda: p.held() == {}, p.held)
    assert tokens_of(ask(d.url, prompt, kv_transfer_params=params)) == tokens_of(ask(p.url, prompt))
    wait_until(lambda: d.counted("vllm:kvgrpc_lost_total") == lost + 1)
    at_rest(servers)


@pytest.mark.parametrize("here", [0, 2 * BLOCK_TOKENS])
def test_what_is_lost_while_it_is_waited_for_is_computed(servers: Servers, here: int) -> None:
    """vLLM has one policy for failed loads of all connectors. `here` is the number of tokens that decode has."""
    p, d = servers
    prompt = prompt_of(150, 740 + here)
    expected = tokens_of(ask(p.url, prompt))
    if here:
        ask(d.url, prompt[: here + 1], max_tokens=1)
    lost, params = d.counted("vllm:kvgrpc_lost_total"), prefilled(p, prompt)
    (lead,) = p.tree(LEAD)
    os.kill(lead, signal.SIGSTOP)
    try:
        assert tokens_of(ask(d.url, prompt, kv_transfer_params=params)) == expected
    finally:
        os.kill(lead, signal.SIGCONT)
    wait_until(lambda: d.counted("vllm:kvgrpc_lost_total") == lost + 1)
    at_rest(servers)
    again, before = prompt_of(100, 741 + here), received(d)
    assert tokens_of(ask(d.url, again, kv_transfer_params=prefilled(p, again))) == tokens_of(ask(p.url, again))
    assert received(d) - before == 100
