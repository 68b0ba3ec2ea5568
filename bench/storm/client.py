"""Sends one request of a storm over HTTP, whose client may hang up."""

import asyncio
import json
import time
from contextlib import suppress
from typing import Any

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector

from bench.storm.outcomes import CUT, FAILED_STREAM, HUNG_UP, TIMED_OUT, UNREACHED, Outcome
from bench.storm.schedule import StormRequest
from tests.vllm.servers import MODEL

REQUEST_S = 120.0
"""Timeout of a client, in seconds. Blocks of requests that nobody wants any more are held for at most 30 s."""

POKE_S = 20.0


def session() -> ClientSession:
    """Returns a session with a connection for each request: a client that hangs up closes its connection."""
    return ClientSession(timeout=ClientTimeout(total=None), connector=TCPConnector(force_close=True, limit=0))


class Answer:
    """The received part of an answer."""

    def __init__(self) -> None:
        self.status = CUT
        self.tokens: list[int] = []

    async def read(self, response: ClientResponse) -> None:
        if response.status != 200:
            self.status = str(response.status)
            await response.read()
        elif response.content_type == "text/event-stream":
            async for line in response.content:
                self._line(line)
        else:
            (choice,) = json.loads(await response.read())["choices"]
            self._choice(choice)

    def _line(self, line: bytes) -> None:
        if not line.startswith(b"data: {"):
            return
        event: dict[str, Any] = json.loads(line[6:])
        if "error" in event:
            self.status = FAILED_STREAM
        for choice in event.get("choices", ()):
            self._choice(choice)

    def _choice(self, choice: dict[str, Any]) -> None:
        self.tokens += choice["token_ids"] or ()
        if choice["finish_reason"] is not None:
            self.status = "200" if choice["finish_reason"] == "length" else f"200, {choice['finish_reason']}"


async def send(http: ClientSession, url: str, request: StormRequest, storm_began: float) -> Outcome:
    """Sends a request. Always returns, with any outcome."""
    body = {"model": MODEL, "prompt": request.prompt, "max_tokens": request.answer_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, "stream": request.streams}
    answer, began = Answer(), time.monotonic()
    limit_s, at_limit = (REQUEST_S, TIMED_OUT) if request.hang_up_s is None else (request.hang_up_s, HUNG_UP)
    try:
        async with asyncio.timeout(limit_s), http.post(f"{url}/v1/completions", json=body) as response:
            await answer.read(response)
        status = answer.status
    except TimeoutError:
        status = at_limit
    except (ClientError, ConnectionError, json.JSONDecodeError):
        status = CUT if answer.tokens else UNREACHED
    return Outcome(request, status, tuple(answer.tokens), time.monotonic() - began, began - storm_began)


async def poke(http: ClientSession, url: str) -> bool:
    """Returns True if a prompt of three tokens is answered."""
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 1, "temperature": 0}
    with suppress(ClientError, TimeoutError):
        async with http.post(f"{url}/v1/completions", json=body, timeout=ClientTimeout(total=POKE_S)) as answer:
            return bool(answer.status == 200)
    return False
