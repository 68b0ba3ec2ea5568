"""Two vLLM servers behind the router in Go: the tokens are those of one engine, and nothing is left."""

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import BLOCK_TOKENS, MAX_TOKENS, START_S, prompt_of, wait_until
from tests.vllm.routers import GO, go_router
from tests.vllm.servers import MODEL, Server, healthy, new_server, ours, serving

FLAGS = ("--max-model-len", "2048", "--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", "400")
Servers = tuple[Server, Server]
pytestmark = pytest.mark.skipif(GO is None, reason="go is not on the PATH")


@pytest.fixture(scope="module")
def servers(model_folder: Path) -> Iterator[Servers]:
    p, d = new_server("P"), new_server("D")
    with serving(p, 0, model_folder, ours(p), FLAGS), serving(d, 1, model_folder, ours(d), FLAGS):
        for server in (p, d):
            wait_until(lambda s=server: healthy(s.url), timeout_s=START_S)  # type: ignore[misc]
        yield p, d


def asked(prompt: list[int], **more: Any) -> bytes:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    return json.dumps({**body, "return_token_ids": True, **more}).encode()


def complete(url: str, prompt: list[int], **more: Any) -> list[int]:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", asked(prompt, **more), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        tokens: list[int] = json.load(answer)["choices"][0]["token_ids"]
    return tokens


def received(server: Server) -> float:
    """Returns the number of tokens whose KV came."""
    return server.counted("vllm:kvgrpc_received_tokens_total")


def hang_up(url: str, prompt: list[int]) -> None:
    """Sends a request, and leaves as soon as it is sent."""
    body = asked(prompt, max_tokens=400)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
        client.sendall(head.encode() + b"\r\n\r\n" + body)


@pytest.mark.parametrize(("mode", "seed"), [("pull", 210), ("push", 211)])
def test_the_router_in_go_gives_equal_tokens_and_cleans_up(
    servers: Servers, model_folder: Path, mode: str, seed: int
) -> None:
    p, d = servers
    with go_router(p, d, model_folder, mode) as url:
        prompt, before = prompt_of(300, seed), received(d)
        assert complete(url, prompt) == complete(p.url, prompt)
        assert received(d) - before == 300
        with pytest.raises(urllib.error.HTTPError, match="400"):
            complete(url, prompt, max_tokens=-1)
        hang_up(url, prompt_of(1500, 10 + seed))
        for server in servers:
            wait_until(lambda s=server: s.held() == {}, server.held)  # type: ignore[misc]
        again = prompt_of(100, 20 + seed)
        assert complete(url, again) == complete(p.url, again)


def test_kv_that_comes_too_late_is_computed_by_the_decode_engine(servers: Servers, model_folder: Path) -> None:
    """The lease ends before it is read."""
    p, d = servers
    with go_router(p, d, model_folder, "pull", "-ttl", "1ms") as url:
        prompt, before = prompt_of(200, 240), d.counted("vllm:kvgrpc_lost_total")
        assert complete(url, prompt) == complete(p.url, prompt)
        wait_until(lambda: d.counted("vllm:kvgrpc_lost_total") - before == 1)
    for server in servers:
        wait_until(lambda s=server: s.held() == {}, server.held)  # type: ignore[misc]
