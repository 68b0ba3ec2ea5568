"""The fleet as WatchEngines tells it, with the time at which each life was first seen in each state."""

import asyncio
import time
from collections.abc import Callable, Iterable

import grpc.aio

from kvgrpc.v1 import fleet_pb2, fleet_pb2_grpc

Seen = tuple[str, int, int]
"""Engine id, life, and state."""


class FleetSight:
    """One watch of a server of FleetService."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = fleet_pb2_grpc.FleetServiceStub(channel)
        self._task = asyncio.create_task(self._watch())
        self._changed = asyncio.Event()
        self.engines: dict[str, fleet_pb2.FleetEngine] = {}
        self.seen_at: dict[Seen, float] = {}

    def healthy(self, engine_ids: Iterable[str]) -> set[str]:
        """Returns the names of those engines that are healthy."""
        there = {one.engine_id for one in self.engines.values() if one.state == fleet_pb2.ENGINE_STATE_HEALTHY}
        return there.intersection(engine_ids)

    async def until(self, holds: Callable[[], bool], timeout_s: float, what: str) -> float:
        """Waits until a condition holds, which only news can change, and returns the time. Raises RuntimeError."""
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    if self._task.done():
                        await self._task
                    changed = self._changed
                    await changed.wait()
        except TimeoutError:
            raise RuntimeError(f"within {timeout_s:g} s it did not come: {what}") from None
        return time.monotonic()

    async def close(self) -> None:
        """Ends the watch."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        try:
            async for news in self._stub.WatchEngines(fleet_pb2.WatchEnginesRequest()):
                now = time.monotonic()
                if news.snapshot:
                    self.engines.clear()
                for entry_id in news.removed_entry_ids:
                    self.engines.pop(entry_id, None)
                for one in news.engines:
                    self.engines[one.entry_id] = one
                    self.seen_at.setdefault((one.engine_id, one.life, one.state), now)
                self._tell()
        finally:
            self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
