"""A storm over one site: its requests, the deaths of D, and what is left afterwards."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from aiohttp import ClientSession

from bench.storm.client import poke, send
from bench.storm.outcomes import Expected, Outcome, wrong_from
from bench.storm.result import Found, Left, found
from bench.storm.schedule import MISSED, Schedule, StormRequest
from bench.storm.site import StormSite
from kvgrpc.errors import KVGrpcError

AT_ONCE = 16
"""Maximum number of requests in flight. Others wait at the client, so that a stuck engine does not get ever more."""
RETURN_S = 240.0
"""Timeout for a killed D, in seconds: it starts for half a minute, and the router asks it again after one more."""
SETTLE_S = 90.0
"""Timeout for held blocks, in seconds: three times what any lease lives."""
LOOK_S = 5.0

Say = Callable[[str], None]


class Storm:
    """One run. Requests are sent in order, and none waits for another's answer, up to AT_ONCE."""

    def __init__(self, site: StormSite, http: ClientSession, expected: Expected, say: Say) -> None:
        self._site = site
        self._http = http
        self._expected = expected
        self._say = say
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._began = time.monotonic()
        self._outcomes: list[Outcome] = []
        self._kills = 0
        self._under_way = 0

    async def run(self, plan: Schedule, limit_s: float) -> Found:
        """Runs the storm until it is over, or for `limit_s` seconds, and returns the result with what is left."""
        looking = asyncio.create_task(self._look(len(plan.requests)))
        try:
            async with asyncio.TaskGroup() as tasks:
                with suppress(TimeoutError):
                    async with asyncio.timeout(limit_s):
                        await self._dispatch(plan, tasks)
        finally:
            looking.cancel()
        storm_s = time.monotonic() - self._began
        self._say(f"over after {storm_s:.0f} s; waiting for blocks that are held")
        left = await self._settle()
        self._outcomes.sort(key=lambda outcome: outcome.request.number)
        return found(self._outcomes, self._expected, left, kills=self._kills, storm_s=storm_s)

    @property
    def outcomes(self) -> list[Outcome]:
        return self._outcomes

    async def _dispatch(self, plan: Schedule, tasks: asyncio.TaskGroup) -> None:
        killed_at = None
        for request in plan.requests:
            if killed_at is not None and request.number == killed_at + MISSED:
                await self._return_of_d()
                killed_at = None
            await asyncio.sleep(request.pause_s)
            await self._slots.acquire()
            tasks.create_task(self._one(request))
            if request.number in plan.kills:
                await asyncio.to_thread(self._site.d.kill)
                self._kills, killed_at = self._kills + 1, request.number
                self._say(f"D is killed at request {request.number}")
        if killed_at is not None:
            await self._return_of_d()

    async def _one(self, request: StormRequest) -> None:
        self._under_way += 1
        try:
            outcome = await send(self._http, self._site.router, request, self._began)
        finally:
            self._under_way -= 1
            self._slots.release()
        self._outcomes.append(outcome)
        at = wrong_from(outcome, self._expected)
        if at is not None:
            self._say(f"WRONG: request {request.number}, {outcome.status}, from token {at} on: {outcome.tokens}")

    async def _return_of_d(self) -> None:
        """Starts D, and waits until the router asks it again, which takes a while."""
        began = time.monotonic()
        self._site.d.start()
        await asyncio.to_thread(self._site.d.wait)
        async with asyncio.timeout(RETURN_S):
            while not await poke(self._http, self._site.router):  # noqa: ASYNC110 - no router tells when it asks D again
                await asyncio.sleep(1)
        self._say(f"D serves again after {time.monotonic() - began:.0f} s")

    async def _look(self, of: int) -> None:
        """Reports progress until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            held = await asyncio.to_thread(self._site.look)
            whole = sum(outcome.answered for outcome in self._outcomes)
            self._say(
                f"{time.monotonic() - self._began:6.0f} s: {len(self._outcomes)} of {of} are over, {whole} answered, "
                f"{self._under_way} under way; {held}"
            )

    async def _settle(self) -> Left:
        began, held = time.monotonic(), {"P": -1, "D": -1}
        while True:
            # An idle vLLM learns of returned blocks in its next step, and then counts anew.
            servers = [place.server for place in (self._site.p, self._site.d)]
            await asyncio.gather(*(poke(self._http, server.url) for server in servers))
            with suppress(OSError, KVGrpcError):
                held = await asyncio.to_thread(self._site.held)
            waited_s = time.monotonic() - began
            if not any(held.values()) or waited_s > SETTLE_S:
                break
            await asyncio.sleep(0.5)
        reclaimed, in_vain = self._site.reclaimed() or (None, None)
        return Left(held, None if any(held.values()) else round(waited_s, 1), reclaimed, in_vain)
