"""A process that publishes some engines in etcd as their leads would: each with a connection and a lease of its own."""

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import Any

from bench.fleet.child import Answerer, answer_lines
from bench.fleet.engines import PresentLives, SimulatedEngine
from kvgrpc.registry.etcd import EtcdPublication, EtcdSettings


class LeadGroup:
    """The publications of some engines."""

    def __init__(self, settings: EtcdSettings, lives: PresentLives, engines: list[SimulatedEngine]) -> None:
        self._settings, self._lives = settings, lives
        self._engines = {engine.engine_id: engine for engine in engines}
        self._present: dict[str, tuple[EtcdPublication, asyncio.Task[None]]] = {}

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Restarts all, or lets one drain or take work again, as a line says."""
        if request["do"] == "restart":
            return {"lives": await self._restart_all(request["seconds"])}
        engine = self._engines[request["engine_id"]]
        entry = engine.entry(self._lives[engine.number], draining=request["draining"])
        at = time.monotonic()
        self._present[engine.engine_id][0].update(entry)
        return {"at": at}

    async def _restart_all(self, seconds: float) -> list[tuple[str, int, float, float]]:
        """Begins a life of each engine, evenly over a time. Returns names, lives, begins and times to be published."""
        step_s = seconds / len(self._engines)
        return await asyncio.gather(
            *(self._restart(engine, place * step_s) for place, engine in enumerate(self._engines.values()))
        )

    async def _restart(self, engine: SimulatedEngine, after_s: float) -> tuple[str, int, float, float]:
        await asyncio.sleep(after_s)
        if engine.engine_id in self._present:
            publication, task = self._present[engine.engine_id]
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await publication.withdraw()
        life, begun = self._lives.begin(engine.number), time.monotonic()
        publication = EtcdPublication(self._settings, engine.entry(life))
        self._present[engine.engine_id] = publication, asyncio.create_task(publication.run())
        await publication.published.wait()
        return engine.engine_id, life, begun, time.monotonic() - begun


async def begin(job: dict[str, Any]) -> tuple[dict[str, Any], Answerer]:
    """Takes the engines. They are published from the first restart on."""
    engines = [SimulatedEngine(**one) for one in job["engines"]]
    group = LeadGroup(EtcdSettings((job["etcd"],), ttl_s=job["ttl_s"]), PresentLives(Path(job["lives"])), engines)
    return {}, group.answer


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # one line for each engine that etcd does not answer
    answer_lines(begin)
