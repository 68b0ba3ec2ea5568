"""The screen of `kvgrpc top` without a terminal, and what it shows."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from textual.pilot import Pilot

from kvgrpc.cli.top.screen import TopApp
from kvgrpc.client import Credentials

DEADLINE_S = 30


@asynccontextmanager
async def screen(*addresses: str, size: tuple[int, int] = (120, 20)) -> AsyncIterator[tuple[TopApp, Pilot[None]]]:
    app = TopApp(addresses, Credentials(), interval_s=0.1, timeout_s=2)
    async with app.run_test(size=size) as pilot:
        yield app, pilot


async def shows(app: TopApp, pilot: Pilot[None], met: Callable[[list[str]], bool]) -> list[str]:
    """Returns the lines of the screen once they are as they should be."""
    until = time.monotonic() + DEADLINE_S
    while not met(lines := app.visible_text()):
        assert time.monotonic() < until, "\n".join(lines)
        await pilot.pause(0.05)
    return lines


def has(*words: str) -> Callable[[list[str]], bool]:
    return lambda lines: all(any(word in line for line in lines) for word in words)
