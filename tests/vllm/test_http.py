"""Two vLLM servers behind routers: the usual one of vLLM, which does not know kvgrpc, and our example."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import BLOCK_TOKENS, DATA_PATHS, MAX_TOKENS, PREFILL, START_S, prompt_of, wait_until
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

Servers = tuple[Server, Server]

FLAGS = ("--max-model-len", "2048", "--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", "400")


@pytest.fixture(scope="module", params=DATA_PATHS)
def servers(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[Servers]:
    """Yields servers over one data path."""
    p, d = new_server("P"), new_server("D")
    with (
        serving(p, 0, model_folder, ours(p, data_paths=[request.param]), FLAGS),
        serving(d, 1, model_folder, ours(d, data_paths=[request.param]), FLAGS),
    ):
        for server in (p, d):
            wait_until(lambda s=server: healthy(s.url), timeout_s=START_S)  # type: ignore[misc]
        yield p, d


@pytest.fixture
def router_url(servers: Servers, model_folder: Path) -> Iterator[str]:
    with usual_router(*servers, model_folder / "router.log") as url:
        yield url


def asked(prompt: list[int], **more: Any) -> bytes:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    return json.dumps({**body, "return_token_ids": True, **more}).encode()


def answer_of(url: str, prompt: list[int], **more: Any) -> Any:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", asked(prompt, **more), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def complete(url: str, prompt: list[int], **more: Any) -> list[int]:
    tokens: list[int] = answer_of(url, prompt, **more)["choices"][0]["token_ids"]
    return tokens


def received(server: Server) -> float:
    """Returns the number of tokens whose KV came, as Prometheus reads it."""
    return server.counted("vllm:kvgrpc_received_tokens_total")


def test_a_router_without_kvgrpc_pulls_from_the_first_request(servers: Servers, router_url: str) -> None:
    p, d = servers
    for seed, length in enumerate([200, 20, 900]):
        prompt, before = prompt_of(length, 100 + seed), received(d)
        tokens = complete(router_url, prompt)
        assert tokens == complete(p.url, prompt)
        assert received(d) - before == length
    for server in servers:
        wait_until(lambda s=server: s.held() == {}, server.held)  # type: ignore[misc]


def all_of(url: str, prompt: Any, **more: Any) -> list[list[int]]:
    """Returns the tokens of all answers."""
    choices = answer_of(url, prompt, temperature=1, top_k=1, **more)["choices"]
    return [choice["token_ids"] for choice in sorted(choices, key=lambda choice: int(choice["index"]))]


def test_several_answers_and_lists_of_prompts_go_through_a_router_as_one_request(
    servers: Servers, router_url: str
) -> None:
    """vLLM makes several requests of each. None of them fails, and what was given is taken or released."""
    p, d = servers
    prompts = [prompt_of(200 + 40 * seed, 140 + seed) for seed in range(4)]
    expected = [complete(p.url, prompt) for prompt in prompts]
    before = [received(d), d.counted("vllm:kvgrpc_lost_total")]
    assert all_of(router_url, prompts[0], n=3) == 3 * [expected[0]]
    assert all_of(router_url, prompts[1:]) == expected[1:]
    assert all_of(router_url, prompts[1:], n=2) == [tokens for tokens in expected[1:] for _ in range(2)]
    after = [received(d), d.counted("vllm:kvgrpc_lost_total")]
    brought = len(prompts[0]) + len(prompts[1]) + len(prompts[1]) % BLOCK_TOKENS  # the last one had its whole blocks
    assert [now - then for now, then in zip(after, before, strict=True)] == [brought, 0]
    for server in servers:
        wait_until(lambda s=server: s.held() == {}, server.held)  # type: ignore[misc]


def test_a_request_that_decode_refuses_lets_its_source_go(servers: Servers) -> None:
    """vLLM shows such a request without its prompt, but its grant is enough."""
    p, d = servers
    ask = {**PREFILL, "kvgrpc_intent": {"ttl": "600s"}}
    params = answer_of(p.url, prompt_of(100, 105), max_tokens=1, kv_transfer_params=ask)["kv_transfer_params"]
    assert p.held()
    with pytest.raises(urllib.error.HTTPError, match="400"):
        complete(d.url, prompt_of(3000, 105), kv_transfer_params=params)
    assert d.held() == {}
    wait_until(lambda: p.held() == {}, p.held)


def test_what_is_lost_sent_unsent_and_refused_is_counted_for_prometheus(servers: Servers) -> None:
    p, d = servers
    for server in servers:  # earlier counts arrive when their blocks are free
        wait_until(lambda s=server: s.held() == {} and s.counted("vllm:kv_cache_usage_perc") == 0)  # type: ignore[misc]
    names = [(p, "sent"), (p, "unsent"), (d, "received"), (d, "lost"), (d, "failures"), (d, "refused")]
    before = [server.counted(f"vllm:kvgrpc_{name}_total") for server, name in names]

    def grown() -> list[float]:
        after = [server.counted(f"vllm:kvgrpc_{name}_total") for server, name in names]
        return [now - then for now, then in zip(after, before, strict=True)]

    prompt = prompt_of(100, 106)
    asks = [PREFILL, {**PREFILL, "kvgrpc_intent": {"ttl": "0.2s"}}]
    good, late = [answer_of(p.url, prompt, max_tokens=1, kv_transfer_params=ask)["kv_transfer_params"] for ask in asks]
    tokens = complete(d.url, prompt, kv_transfer_params=good)
    wait_until(lambda: p.held() == {}, p.held)
    for params in (late, {**late, "kvgrpc_grant": "nonsense"}):
        assert complete(d.url, prompt, kv_transfer_params=params) == tokens, "what does not come is computed"
    wait_until(lambda: grown() == [1, 1, 1, 1, 1, 1], grown)


@pytest.mark.parametrize(("mode", "seed"), [("pull", 110), ("push", 111)])
def test_the_example_router_gives_equal_tokens_and_cleans_up(
    servers: Servers, model_folder: Path, mode: str, seed: int
) -> None:
    p, d = servers
    with example_router(*servers, model_folder / "our-router.log", mode) as url:
        prompt, before = prompt_of(300, seed), received(d)
        assert complete(url, prompt) == complete(p.url, prompt)
        assert received(d) - before == 300
        with pytest.raises(urllib.error.HTTPError, match="502"):
            complete(url, prompt, max_tokens=-1)
        with waiting_client(url, asked(prompt_of(1500, 10 + seed), max_tokens=400)):
            pass
        for server in servers:
            wait_until(lambda s=server: s.held() == {}, server.held)  # type: ignore[misc]
        again = prompt_of(100, 20 + seed)
        assert complete(url, again) == complete(p.url, again)
