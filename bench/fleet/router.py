"""A process that knows the fleet as a router does, by the Python client's watch of `kvgrpc fleet`."""

import asyncio
from typing import Any

from bench.fleet.child import Answerer, answer_lines
from kvgrpc.client import connect
from kvgrpc.client.fleet import FleetEngines


class WatchingRouter:
    """The last list of engines."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._engines: FleetEngines | None = None
        self._told = asyncio.Condition()
        self._task = asyncio.create_task(self._watch())

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answers when the list has as many engines as a line says."""
        async with self._told:
            await self._told.wait_for(lambda: self._engines and len(self._engines.engines) == request["engines"])
        return {}

    async def _watch(self) -> None:
        async with connect(self._address) as client:
            async for event in client.fleet().watch():
                if isinstance(event, FleetEngines):
                    async with self._told:
                        self._engines = event
                        self._told.notify_all()


async def begin(job: dict[str, Any]) -> tuple[dict[str, Any], Answerer]:
    """Watches, until the process ends."""
    return {}, WatchingRouter(job["address"]).answer


if __name__ == "__main__":
    answer_lines(begin)
