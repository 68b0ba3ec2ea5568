"""After a defect: the next life of a server without an engine begins by itself.

At once, the first time. Those that follow within a while each double the pause: a defect that recurs at once must not
keep a server busy with beginning. An engine that was attached is not waited for here: the end of its session begins
what comes next.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from kvgrpc.service.runner import Runner

_log = logging.getLogger(__name__)

DEFECTS_S = 60.0
"""Those that are longer ago hold up nothing."""
PAUSE_MAX_S = 30.0
DEFECTS_KEPT = 8
"""As many as make the longest pause."""

Step = Callable[[], Awaitable[None]]


class Recovery:
    """`end` gives back the memory of the last life, `begin` begins the next one unless an engine did."""

    def __init__(self, runner: Runner, end: Step, begin: Step) -> None:
        self._runner = runner
        self._end = end
        self._begin = begin
        self._task: asyncio.Task[None] | None = None
        self._defects: deque[float] = deque(maxlen=DEFECTS_KEPT)

    def noted(self) -> None:
        """There was a defect."""
        self._defects.append(self._runner.now)

    def start(self) -> None:
        """Begins what is to come, unless that is under way."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._recover())

    async def stop(self) -> None:
        """Begins nothing any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _recover(self) -> None:
        while self._runner.node.state.defect:
            seen = self._runner.defects
            try:
                await self._end()
                await asyncio.sleep(self._pause_s())
                await self._begin()
            except Exception:  # noqa: BLE001 - logged, and tried again
                _log.exception("no life begins after the defect")
                await asyncio.sleep(PAUSE_MAX_S)
            else:
                if seen == self._runner.defects:
                    return  # a server without a pool waits for an engine

    def _pause_s(self) -> float:
        recent = sum(when > self._runner.now - DEFECTS_S for when in self._defects)
        return min(2.0 ** (recent - 2), PAUSE_MAX_S) if recent > 1 else 0.0
