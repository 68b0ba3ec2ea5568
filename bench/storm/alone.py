"""The right answers: those of an engine without any connector, which computes every prompt whole.

It is another engine than P and D, so that wrongly written memory cannot look right on both sides. It runs before the
storm, and has ended when the storm begins.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from aiohttp import ClientSession

from bench.storm.client import send
from bench.storm.outcomes import Expected
from bench.storm.schedule import Schedule, StormRequest
from bench.storm.site import EXACT, FLAGS, EnginePlace
from tests.vllm.engines import SEQUENCES, Engines
from tests.vllm.servers import Server, new_server

POOL = ("--num-gpu-blocks-override", "400", "--no-enable-prefix-caching")


@contextmanager
def alone(engines: Engines) -> Iterator[Server]:
    """Runs the engine, and yields it once it is up."""
    place = EnginePlace(new_server("alone"), engines, 0, {}, {}, (*FLAGS, *EXACT, *POOL))
    try:
        place.start()
        place.wait()
        yield place.server
    finally:
        place.stop()


async def right_answers(http: ClientSession, server: Server, plan: Schedule) -> Expected:
    """Returns the answer to each prompt, as long as any of its requests wants. Raises RuntimeError if one fails."""
    longest: dict[tuple[int, ...], StormRequest] = {}
    for request in plan.requests:
        known = longest.get(request.prompt)
        if known is None or known.answer_tokens < request.answer_tokens:
            longest[request.prompt] = replace(request, hang_up_s=None)
    slots = asyncio.Semaphore(SEQUENCES)

    async def answer(request: StormRequest) -> tuple[int, ...]:
        async with slots:
            outcome = await send(http, server.url, request, 0.0)
        if not outcome.answered:
            raise RuntimeError(f"the engine that is alone did not answer request {request.number}: {outcome.status}")
        return outcome.tokens

    return dict(zip(longest, await asyncio.gather(*map(answer, longest.values())), strict=True))
