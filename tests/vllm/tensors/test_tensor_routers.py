"""Two vLLM servers that exchange prompts as tensors behind routers: ours, those that run the legs in turn without
kvgrpc, and those that pair engines by the request's id.
"""

import itertools
import json
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from kvgrpc.client import connect_sync
from tests.vllm.engines import BLOCK_TOKENS, MAX_TOKENS, START_S, free_port, prompt_of, wait_until
from tests.vllm.routers import GO, discovering_router, go_router
from tests.vllm.servers import (
    MODEL,
    Server,
    example_router,
    healthy,
    new_server,
    ours,
    serving,
    usual_router,
    waiting_client,
)
from tests.vllm.xpyd import xpyd_proxy

Servers = tuple[Server, Server]
Router = Callable[[Servers, Path], AbstractContextManager[str]]
BLOCK_FLAGS = ("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", "400")
FLAGS = ("--max-model-len", "2048", "--dtype", "float32", *BLOCK_FLAGS)
"""Flags of both servers. In bfloat16 two tokens may be equally likely, and other requests would decide between them."""
LENGTHS = [200, 20, 900]
SEEDS = itertools.count(500)


@contextmanager
def two_servers(folder: Path, of_each: Callable[[str, Server], dict[str, object]]) -> Iterator[Servers]:
    p, d = new_server("P"), new_server("D")
    with (
        serving(p, 0, folder, ours(p, mode="tensors") | of_each("P", p), FLAGS),
        serving(d, 1, folder, ours(d, mode="tensors") | of_each("D", d), FLAGS),
    ):
        for server in (p, d):
            wait_until(lambda s=server: healthy(s.url), timeout_s=START_S)  # type: ignore[misc]
        yield p, d


@pytest.fixture(scope="module")
def servers(model_folder: Path) -> Iterator[Servers]:
    """Yields servers with the default settings."""
    with two_servers(model_folder, lambda _, __: {}) as pair:
        yield pair


@pytest.fixture(scope="module")
def discovery_port() -> int:
    """Returns the port at which a proxy listens for engines; each proxy uses it in turn."""
    return free_port()


@pytest.fixture(scope="module")
def registered_servers(model_folder: Path, discovery_port: int) -> Iterator[Servers]:
    """Yields servers that register with a proxy."""

    def registers(name: str, server: Server) -> dict[str, object]:
        proxy = {"proxy_ip": "127.0.0.1", "proxy_port": str(discovery_port), "http_port": str(server.port)}
        extra = {"listen": server.lead, "mode": "tensors", **proxy}
        return {"kv_role": "kv_producer" if name == "P" else "kv_consumer", "kv_connector_extra_config": extra}

    with two_servers(model_folder, registers) as pair:
        yield pair


def through_go(servers: Servers, folder: Path, mode: str) -> AbstractContextManager[str]:
    if GO is None:
        pytest.skip("go is not on the PATH")
    return go_router(*servers, folder, mode)


ROUTERS: dict[str, Router] = {
    "vllm-router": lambda servers, folder: usual_router(*servers, folder / "tensors-router.log"),
    "examples/router, pull": lambda servers, folder: example_router(*servers, folder / "tensors-ours.log", "pull"),
    "examples/router, push": lambda servers, folder: example_router(*servers, folder / "tensors-ours.log", "push"),
    "examples/router-go, pull": lambda servers, folder: through_go(servers, folder, "pull"),
    "examples/router-go, push": lambda servers, folder: through_go(servers, folder, "push"),
}


def complete(url: str, prompt: list[int], **more: object) -> list[int]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, **more}
    data, headers = json.dumps({**body, "return_token_ids": True}).encode(), {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", data, headers), timeout=90) as answer:
        tokens: list[int] = json.load(answer)["choices"][0]["token_ids"]
    return tokens


def loaded(server: Server) -> tuple[float, float]:
    """Returns the number of tokens that it did not compute, by our count and by vLLM's."""
    ours, theirs = "vllm:kvgrpc_received_tokens_total", "vllm:external_prefix_cache_hits_total"
    return server.counted(ours), server.counted(theirs)


def stored(server: Server) -> int:
    """Returns the number of tensors in its store, received or kept."""
    with connect_sync(server.lead) as lead:
        status = lead.tensors().status()
    return int(status.tensor_count + status.offered_count)


def serves(servers: Servers, url: str) -> None:
    """Checks that answers have the tokens of one engine, and decode loaded all of each prompt but the last token."""
    p, d = servers
    for length in LENGTHS:
        prompt, (ours, theirs) = prompt_of(length, next(SEEDS)), loaded(d)
        tokens = complete(url, prompt)
        assert tokens == complete(p.url, prompt)
        expected = ours + length - 1, theirs + length - 1
        wait_until(lambda: loaded(d) == expected, lambda: (loaded(d), expected))  # noqa: B023 - it is this round's
    for server in servers:
        wait_until(lambda s=server: stored(s) == 0)  # type: ignore[misc]


@pytest.mark.parametrize("router", ROUTERS)
def test_engines_as_they_are_by_default_exchange_tensors_behind_a_router(
    servers: Servers, model_folder: Path, router: str
) -> None:
    with ROUTERS[router](servers, model_folder) as url:
        serves(servers, url)


def test_several_answers_and_lists_of_prompts_go_through_a_router_as_one_request(
    servers: Servers, model_folder: Path
) -> None:
    """vLLM makes several requests of each. One gives, all its answers take; other prompts of a list are computed."""
    p, d = servers
    prompts = [prompt_of(200 + 40 * number, next(SEEDS)) for number in range(3)]
    expected = [complete(p.url, prompt) for prompt in prompts]
    before, lost = loaded(d)[0], d.counted("vllm:kvgrpc_lost_total")
    given = p.counted("vllm:kvgrpc_sent_total")
    with usual_router(*servers, model_folder / "tensors-siblings.log") as url:
        assert _all(url, prompt=prompts[0], n=3, temperature=1, top_k=1) == 3 * [expected[0]]
        assert _all(url, prompt=prompts[1:]) == expected[1:]
        assert _all(url, prompt=prompts[1:], n=2, temperature=1, top_k=1) == [
            tokens for tokens in expected[1:] for _ in range(2)
        ]
    assert loaded(d)[0] - before >= len(prompts[0]) + len(prompts[1]) - 2
    assert d.counted("vllm:kvgrpc_lost_total") == lost
    wait_until(lambda: p.counted("vllm:kvgrpc_sent_total") == given + 3)
    for server in servers:
        wait_until(lambda s=server: stored(s) == 0)  # type: ignore[misc]


@pytest.mark.parametrize("answers", [1, 2])
def test_clients_that_hang_up_leave_nothing_in_either_store(servers: Servers, model_folder: Path, answers: int) -> None:
    """One client hangs up at once, one while decode answers."""
    p, d = servers
    more = {"max_tokens": 800, "n": answers, "temperature": 1, "top_k": 1, "ignore_eos": True, "model": MODEL}
    with usual_router(*servers, model_folder / "tensors-hang-ups.log") as url:
        with waiting_client(url, json.dumps({"prompt": prompt_of(1100, next(SEEDS)), **more}).encode()):
            pass
        before = loaded(d)[0]
        with waiting_client(url, json.dumps({"prompt": prompt_of(1000, next(SEEDS)), **more}).encode()):
            wait_until(lambda: loaded(d)[0] > before)
        for server in servers:
            wait_until(lambda s=server: stored(s) == 0)  # type: ignore[misc]
            wait_until(lambda s=server: s.counted("vllm:num_requests_running") == 0)  # type: ignore[misc]
        prompt = prompt_of(100, next(SEEDS))
        assert complete(url, prompt) == complete(p.url, prompt)


def test_a_proxy_that_pairs_engines_by_the_requests_id_moves_their_tensors(
    registered_servers: Servers, discovery_port: int
) -> None:
    port = free_port()
    with xpyd_proxy(port, discovery_port) as registered:
        wait_until(registered.both)
        p, d = registered_servers
        assert registered.engines == {"P": {f"127.0.0.1:{p.port}": p.lead}, "D": {f"127.0.0.1:{d.port}": d.lead}}
        serves(registered_servers, f"http://127.0.0.1:{port}")
        two, before = [prompt_of(100, next(SEEDS)), prompt_of(150, next(SEEDS))], loaded(d)[0]
        answers = _all(f"http://127.0.0.1:{port}", prompt=two)
        assert answers == [complete(p.url, prompt) for prompt in two]
        wait_until(lambda: loaded(d)[0] == before + 99 + 149, lambda: loaded(d))


def _all(url: str, **fields: object) -> list[list[int]]:
    """Returns the answers to a request that has several."""
    body = {"model": MODEL, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    data, headers = json.dumps(body | fields).encode(), {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", data, headers), timeout=90) as answer:
        choices = sorted(json.load(answer)["choices"], key=lambda choice: int(choice["index"]))
        return [choice["token_ids"] for choice in choices]


def test_a_router_that_finds_engines_by_their_registration_moves_their_tensors(
    registered_servers: Servers, discovery_port: int, model_folder: Path
) -> None:
    with discovering_router(discovery_port, model_folder / "tensors-discovery.log") as url:
        serves(registered_servers, url)
