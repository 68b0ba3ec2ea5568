"""The times at which a follower begins its health checks, on a loop whose clock moves only while nothing is to do."""

import asyncio
import selectors
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from selectors import SelectorKey

import pytest

from kvgrpc.fleet.directory import Directory, HealthCheck
from kvgrpc.registry.base import RegistryListing, RegistryNews
from kvgrpc.registry.following import APART_S, LOOK_S, DirectoryFollower
from tests.fleet.entries import entry, listing


class WaitsAtOnce(selectors.DefaultSelector):
    """A selector that adds a wait to its clock in place of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        assert timeout is not None, "nothing will ever happen"
        self.now += max(timeout, 0.0)
        return super().select(0)


@pytest.fixture
def loop() -> Iterator[asyncio.SelectorEventLoop]:
    selector = WaitsAtOnce()
    made = asyncio.SelectorEventLoop(selector)
    made.time = lambda: selector.now  # type: ignore[method-assign] # the clock of all timers
    yield made
    made.close()


class OneListing:
    """A registry that tells one listing."""

    def __init__(self, engines: int) -> None:
        self._news = RegistryListing(tuple(listing(*(entry(f"e{number}") for number in range(engines)))))

    async def watch(self) -> AsyncIterator[RegistryNews]:
        yield self._news
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass


async def begun(engines: int, seconds: float = 3 * LOOK_S) -> list[float]:
    """Follows so many engines for a time. Returns the times at which their checks begin."""
    now, found = asyncio.get_running_loop().time, list[float]()

    async def ask(_: HealthCheck) -> bool:
        found.append(now())
        return True

    follower = DirectoryFollower(Directory(), OneListing(engines), ask)
    follower.start()
    await asyncio.sleep(seconds)
    await follower.stop()
    return found


@pytest.mark.parametrize("engines", [2, 20, 1_000])
def test_checks_that_are_due_together_begin_within_a_look_and_few_at_a_time(
    loop: asyncio.SelectorEventLoop, engines: int
) -> None:
    times = loop.run_until_complete(begun(engines))
    assert len(times) == engines
    assert max(times) - min(times) < LOOK_S
    assert max(Counter(times).values()) <= engines * APART_S / LOOK_S + 1


def test_a_check_that_is_due_alone_begins_with_its_look(loop: asyncio.SelectorEventLoop) -> None:
    (alone,) = loop.run_until_complete(begun(1))
    assert alone / LOOK_S == pytest.approx(round(alone / LOOK_S))
