"""Waiters and watches on transfers: woken by changes, never by a timer of their own."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvgrpc.core.transfers import Transfer
from kvgrpc.errors import Exhausted, Reason
from kvgrpc.service.runner import Runner

WATCHES_MAX = 256
WATCH_BACKLOG_MAX = 8_192
"""Changes that a slow watcher may be behind; it resumes from the log afterwards."""

Condition = Callable[[Transfer], bool]


class Watchers:
    """Everybody who waits for transfers of this server."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._waiters: dict[str, list[tuple[Condition, asyncio.Future[None]]]] = {}
        self._watches: list[Watch] = []
        runner.on_transfer.append(self._changed)

    async def wait(self, transfer_id: str, condition: Condition, timeout_s: float) -> Transfer:
        """The transfer once `condition` holds, or as it is when the time is over. Raises NotFound."""
        transfer = self._runner.node.state.transfers.get(transfer_id)
        if condition(transfer):
            return transfer
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        entry = (condition, future)
        self._waiters.setdefault(transfer_id, []).append(entry)
        timer = loop.call_later(timeout_s, _wake, future)
        try:
            await future
        finally:
            timer.cancel()
            self._leave(transfer_id, entry)
        self._runner.advance()
        return self._runner.node.state.transfers.get(transfer_id)

    @contextmanager
    def watch(self, wanted: Condition, backlog: list[Transfer]) -> Iterator["Watch"]:
        """`backlog`, then every change from now on, as far as wanted. Raises Exhausted when too many watch."""
        if len(self._watches) >= WATCHES_MAX:
            raise Exhausted(Reason.LIMIT_EXCEEDED, f"{WATCHES_MAX} watches are open", retry_delay_s=1.0)
        watch = Watch(wanted, backlog)
        self._watches.append(watch)
        try:
            yield watch
        finally:
            self._watches.remove(watch)

    def _changed(self, transfer: Transfer) -> None:
        for condition, future in self._waiters.get(transfer.id, ()):
            if condition(transfer):
                _wake(future)
        for watch in self._watches:
            watch.add(transfer)

    def _leave(self, transfer_id: str, entry: tuple[Condition, asyncio.Future[None]]) -> None:
        waiters = self._waiters[transfer_id]
        waiters.remove(entry)
        if not waiters:
            del self._waiters[transfer_id]


def _wake(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class Watch:
    """The changes that one watcher has not seen yet."""

    def __init__(self, wanted: Condition, backlog: list[Transfer]) -> None:
        self._wanted = wanted
        self._queue: deque[Transfer] = deque(filter(wanted, backlog))
        self._news = asyncio.Event()
        self._overflow = False

    def add(self, transfer: Transfer) -> None:
        if not self._wanted(transfer) or self._overflow:
            return
        self._overflow = len(self._queue) >= WATCH_BACKLOG_MAX
        self._queue.append(transfer)
        self._news.set()

    async def next(self) -> Transfer:
        """The next change, in order. Raises Exhausted for a watcher that is too slow."""
        while not self._queue:
            self._news.clear()
            await self._news.wait()
        if self._overflow and len(self._queue) == 1:
            raise Exhausted(Reason.LIMIT_EXCEEDED, "this watch fell too far behind; resume it", retry_delay_s=0.1)
        return self._queue.popleft()
