"""Callers that watch the engine's state: events wake them, and they are told when anything visible has changed."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from kvgrpc.service.places import Places
from kvgrpc.service.runner import Runner

INTERVAL_S = 0.1
"""Minimum interval between two messages to a watcher, in seconds."""
BEAT_S = 5.0
"""Maximum interval between two messages to a watcher, in seconds: they also show that the server lives."""
ENGINE_WATCHES_MAX = 1_024
ENGINE_WATCHES_OF_CONNECTION_MAX = 64


class EngineWatchers:
    """All watchers of one server."""

    def __init__(self, runner: Runner) -> None:
        self._asleep: set[asyncio.Event] = set()
        """Events of watchers that saw the present state: the node's next event wakes each once, until it has looked."""
        each, most = ENGINE_WATCHES_OF_CONNECTION_MAX, ENGINE_WATCHES_MAX
        share = runner.node.state.limits.of_tenant(most)
        self._places = Places("watches of the engine", each, most, 1.0, own=1, of_tenant=share)
        self._on_events = runner.on_events
        self._watching = 0

    def changed(self) -> None:
        """Wakes the watchers. Call it also for changes that no event of the node tells."""
        while self._asleep:
            self._asleep.pop().set()

    @contextmanager
    def one(self) -> Iterator["EngineWatcher"]:
        """Yields a new watcher. Raises Exhausted if too many watch."""
        with self._places.one():
            watcher = EngineWatcher(self._asleep)
            if not self._watching:
                self._on_events.append(self.changed)
            self._watching += 1
            try:
                yield watcher
            finally:
                self._watching -= 1
                if not self._watching:
                    self._on_events.remove(self.changed)
                watcher.leave()


class EngineWatcher:
    """One watcher: it tells when to look at the engine again."""

    def __init__(self, asleep: set[asyncio.Event]) -> None:
        self._asleep = asleep
        self._changed = asyncio.Event()
        self._asleep.add(self._changed)
        self._next_beat = 0.0

    def told(self) -> None:
        """Notes that the watcher was told the engine's state."""
        self._next_beat = asyncio.get_running_loop().time() + BEAT_S

    async def wait(self, interval_s: float) -> bool:
        """Waits for the interval, then for a change or a beat. Returns whether to tell even if nothing changed."""
        await asyncio.sleep(interval_s)
        try:
            async with asyncio.timeout_at(self._next_beat):
                await self._changed.wait()
        except TimeoutError:
            return True
        self._changed.clear()
        self._asleep.add(self._changed)
        # A busy engine always has a change to report, though its visible state may be the same each time.
        return asyncio.get_running_loop().time() >= self._next_beat

    def leave(self) -> None:
        self._asleep.discard(self._changed)
