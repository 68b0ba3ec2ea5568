"""Streams of peers that stand as long as both leads do, and their end before the server's: gRPC, which would break
them off after its grace, reports a call whose peer hangs up at that moment as a defect.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from kvgrpc.errors import Reason, Unavailable

END_S = 1.0
"""Far above what it takes to end them."""


class Standing:
    """The streams that stand now."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()
        self._over = False

    @contextmanager
    def one(self) -> Iterator[None]:
        """A stream, served inside by the present task: it returns in order when all are ended.

        Raises Unavailable (DRAINING) after that.
        """
        if self._over:
            raise Unavailable(Reason.DRAINING, "the server is stopping")
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self._over:
                raise
            task.uncancel()
        finally:
            self._tasks.discard(task)

    async def end(self) -> None:
        """Ends all; none begins any more."""
        self._over = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=END_S)
