"""Callers that watch how the engine is: woken by events, and told when something that they can see has changed."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from kvgrpc.service.places import Places
from kvgrpc.service.runner import Runner

INTERVAL_S = 0.1
"""No watcher is told more often than that."""
BEAT_S = 5.0
"""Each is told so often though nothing has changed: then it knows that the server lives."""
ENGINE_WATCHES_MAX = 1_024
ENGINE_WATCHES_OF_CONNECTION_MAX = 64


class EngineWatchers:
    """All of one server."""

    def __init__(self, runner: Runner) -> None:
        self._asleep: set[asyncio.Event] = set()
        """Of watchers that have seen all there was: an event of the node wakes each once, until it has looked."""
        self._places = Places("watches of the engine", ENGINE_WATCHES_OF_CONNECTION_MAX, ENGINE_WATCHES_MAX, 1.0, own=0)
        runner.on_events.append(self.changed)

    def changed(self) -> None:
        """Something may have changed that no event of the node tells, too."""
        while self._asleep:
            self._asleep.pop().set()

    @contextmanager
    def one(self) -> Iterator["EngineWatcher"]:
        """A watcher, from now on. Raises Exhausted when too many watch."""
        with self._places.one():
            watcher = EngineWatcher(self._asleep)
            try:
                yield watcher
            finally:
                watcher.leave()


class EngineWatcher:
    """When to look again."""

    def __init__(self, asleep: set[asyncio.Event]) -> None:
        self._asleep = asleep
        self._changed = asyncio.Event()
        self._asleep.add(self._changed)
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
        self._asleep.add(self._changed)
        # An engine at work always has something that changed, and it may look the same each time.
        return asyncio.get_running_loop().time() >= self._next_beat

    def leave(self) -> None:
        """It watches no more."""
        self._asleep.discard(self._changed)
