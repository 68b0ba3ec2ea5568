"""Runs code that starts processes, so that a signal ends it only where it waits."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_stoppable(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine as `asyncio.run` does. SIGTERM cancels it, as SIGINT does, and the command exits with 143.

    An exception that a signal handler raises could end asyncio's own work instead: between the start of a process and
    the connection of its pipes, for example, after which nothing notices the end of that process.
    """
    told = False

    async def stoppable() -> T:
        task = asyncio.current_task()
        assert task is not None

        def stop() -> None:
            nonlocal told
            told = True
            task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
        return await main

    try:
        return asyncio.run(stoppable())
    except asyncio.CancelledError:
        if told:
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
