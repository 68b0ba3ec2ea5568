"""The timed parts of a request through vLLM's HTTP servers: one leg, the gap between legs, or all of it."""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientSession

from tests.vllm.engines import MAX_TOKENS
from tests.vllm.processes import runs
from tests.vllm.servers import MODEL, Server

Prompt = list[int]
# The parameters that vllm-router sends to any prefill engine.
_REMOTE = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, **_REMOTE}


@dataclass(frozen=True)
class Pair:
    """Two engines with one connector, and the router before them."""

    p: Server
    d: Server
    router: str
    processes: tuple[int, ...]
    """Process ids of both engines, with all that they started."""

    def signal(self, number: int) -> None:
        """Sends a signal to the processes that are left."""
        for pid in filter(runs, self.processes):
            os.kill(pid, number)


class Legs:
    """Requests of one client."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session

    async def decode_leg(self, pair: Pair, prompts: Sequence[Prompt]) -> list[float]:
        """Returns the seconds of each decode leg for one token, all at once, long after their prefill."""
        params = [await self._prefill(pair, prompt) for prompt in prompts]

        async def leg(prompt: Prompt, params: Any) -> float:
            began = time.perf_counter()
            await self._answer(pair.d.url, prompt, max_tokens=1, kv_transfer_params=params)
            return time.perf_counter() - began

        return await asyncio.gather(*map(leg, prompts, params))

    async def hand_over(self, pair: Pair, prompts: Sequence[Prompt]) -> list[float]:
        """Returns the seconds from the answer of each prefill leg to the first token that its decode leg streams."""

        async def both(prompt: Prompt) -> float:
            params = await self._prefill(pair, prompt)
            began = time.perf_counter()
            return await self._first_token(pair.d.url, prompt, params) - began

        return await asyncio.gather(*map(both, prompts))

    async def router(self, pair: Pair, prompts: Sequence[Prompt]) -> list[float]:
        """Returns the seconds of each whole request, from client to router and back."""

        async def whole(prompt: Prompt) -> float:
            began = time.perf_counter()
            await self._answer(pair.router, prompt, max_tokens=MAX_TOKENS)
            return time.perf_counter() - began

        return await asyncio.gather(*map(whole, prompts))

    async def wake(self, pair: Pair) -> None:
        """Waits until both engines have answered something."""
        for server in (pair.p, pair.d):
            await self._answer(server.url, [5, 6, 7], max_tokens=1)

    async def _prefill(self, pair: Pair, prompt: Prompt) -> Any:
        return (await self._answer(pair.p.url, prompt, max_tokens=1, kv_transfer_params=PREFILL))["kv_transfer_params"]

    async def _answer(self, url: str, prompt: Prompt, **more: Any) -> Any:
        async with self._session.post(f"{url}/v1/completions", json=_asked(prompt, **more)) as answer:
            return await answer.json()

    async def _first_token(self, url: str, prompt: Prompt, params: Any) -> float:
        """Returns when the first token came. The rest is read, too."""
        body = _asked(prompt, max_tokens=MAX_TOKENS, kv_transfer_params=params, stream=True)
        first = 0.0
        async with self._session.post(f"{url}/v1/completions", json=body) as answer:
            async for line in answer.content:
                if not first and line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["token_ids"]:
                    first = time.perf_counter()
        assert first, "the decode engine streamed no token"
        return first


def _asked(prompt: Prompt, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **more}


MEASURES: dict[str, Callable[[Legs, Pair, Sequence[Prompt]], Awaitable[list[float]]]] = {
    "decode_leg": Legs.decode_leg,
    "hand_over": Legs.hand_over,
    "router": Legs.router,
}
