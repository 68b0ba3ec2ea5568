"""Callers that watch how the engine is: woken by events, and told when something that they can see has changed."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from kvgrpc.service.runner import Runner

INTERVAL_S = 0.1
"""No watcher is told more often than that."""
BEAT_S = 5.0
"""Each is told so often though nothing has changed: then it knows that the server lives."""


class EngineWatchers:
    """All of one server."""

    def __init__(self, runner: Runner) -> None:
        self._woken: set[asyncio.Event] = set()
        runner.on_events.append(self.changed)

    def changed(self) -> None:
        """Something may have changed that no event of the node tells, too."""
        for event in self._woken:
            event.set()

    @contextmanager
    def one(self) -> Iterator["EngineWatcher"]:
        """A watcher, from now on."""
        event = asyncio.Event()
        self._woken.add(event)
        try:
            yield EngineWatcher(event)
        finally:
            self._woken.discard(event)


class EngineWatcher:
    """When to look again."""

    def __init__(self, changed: asyncio.Event) -> None:
        self._changed = changed
        self._next_beat = 0.0

    def told(self) -> None:
        """It was told how the engine is."""
        self._next_beat = asyncio.get_running_loop().time() + BEAT_S

    async def wait(self, interval_s: float) -> bool:
        """Until something may have changed, and at least for the interval. Whether it is to be told in any case."""
        await asyncio.sleep(interval_s)
        try:
            async with asyncio.timeout_at(self._next_beat):
                await self._changed.wait()
        except TimeoutError:
            return True
        self._changed.clear()
        return False
