"""Recovery after a defect: the next life of a server without an engine begins by itself.

It begins at once after a first defect. Each further defect within DEFECTS_S doubles the pause: a defect that recurs at
once must not keep a server busy with beginning. An attached engine is not waited for here: the end of its session
begins what comes next.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from kvgrpc.service.runner import Runner

_log = logging.getLogger(__name__)

DEFECTS_S = 60.0
"""Age of a defect that no longer counts, in seconds."""
PAUSE_MAX_S = 30.0
DEFECTS_KEPT = 8
"""Number of defects remembered: enough for the longest pause."""

Step = Callable[[], Awaitable[None]]


class Recovery:
    """Begins lives after defects. `end` frees the last life's memory; `begin` begins the next unless an engine did."""

    def __init__(self, runner: Runner, end: Step, begin: Step) -> None:
        self._runner = runner
        self._end = end
        self._begin = begin
        self._task: asyncio.Task[None] | None = None
        self._defects: deque[float] = deque(maxlen=DEFECTS_KEPT)

    def noted(self) -> None:
        self._defects.append(self._runner.time())

    def start(self) -> None:
        """Starts the recovery, unless it runs."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._recover())

    async def stop(self) -> None:
        """Stops the recovery: no life begins any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _recover(self) -> None:
        while self._runner.node.state.life.defect:
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
                    return  # also when no life began: a server without a pool waits for an engine

    def _pause_s(self) -> float:
        recent = sum(when > self._runner.time() - DEFECTS_S for when in self._defects)
        return min(2.0 ** (recent - 2), PAUSE_MAX_S) if recent > 1 else 0.0
