"""A watcher of the engine: when it looks again, and when it gets a beat though nothing has changed."""

import asyncio

import pytest

from kvgrpc.service import engine_watchers
from kvgrpc.service.engine_watchers import EngineWatcher


async def test_an_engine_at_work_that_looks_the_same_beats_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_watchers, "BEAT_S", 0.05)
    asleep: set[asyncio.Event] = set()
    watcher = EngineWatcher(asleep)
    watcher.told()
    looks = 0
    async with asyncio.timeout(10):
        while True:
            asleep.pop().set()
            if await watcher.wait(0.001):
                break
            looks += 1
    assert looks


async def test_an_event_wakes_each_watcher_once_until_it_has_looked() -> None:
    asleep: set[asyncio.Event] = set()
    first, second = EngineWatcher(asleep), EngineWatcher(asleep)
    for watcher in (first, second):
        watcher.told()
    assert len(asleep) == 2
    while asleep:
        asleep.pop().set()
    assert not await first.wait(0.0)
    assert len(asleep) == 1
    second.leave()
    first.leave()
    assert not asleep
