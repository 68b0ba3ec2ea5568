"""Waiters and watches on transfers: woken by changes, never by a timer of their own."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from kvgrpc.core.tables.transfers import Transfer
from kvgrpc.errors import Aborted, Exhausted, Reason
from kvgrpc.service.places import Places
from kvgrpc.service.runner import Runner

WATCHES_MAX = 256
WATCHES_OF_CONNECTION_MAX = 64
WATCH_BACKLOG_MAX = 8_192
"""Changes that a slow watcher may be behind; it resumes from the log afterwards."""

PROGRESS_SHARE = 4
"""A watcher is told how far it is after this part of the history without news for it, so that it can always resume."""

Condition = Callable[[Transfer], bool]


class News(NamedTuple):
    """What a watcher is told: a change, or only how far it is when nothing of late was for it."""

    seq: int
    """Everything up to this number was told: the one to resume after."""
    transfer: Transfer | None


class Watchers:
    """All callers that wait for transfers of this server."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._waiters: dict[str, list[tuple[Condition, asyncio.Future[Transfer | None]]]] = {}
        self._watches: list[Watch] = []
        self._places = Places("watches", WATCHES_OF_CONNECTION_MAX, WATCHES_MAX, 1.0, own=0)
        runner.on_transfer.append(self._changed)
        runner.on_life.append(self._life_over)

    async def wait(self, transfer_id: str, condition: Condition, timeout_s: float) -> Transfer:
        """The transfer as it is when `condition` begins to hold, or when the time is over. Raises NotFound."""
        transfer = self._runner.node.state.transfers.get(transfer_id)
        if condition(transfer):
            return transfer
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Transfer | None] = loop.create_future()
        entry = (condition, future)
        self._waiters.setdefault(transfer_id, []).append(entry)
        timer = loop.call_later(timeout_s, _wake, future)
        try:
            found = await future
        finally:
            timer.cancel()
            self._leave(transfer_id, entry)
        if found is not None:  # not asked for again: its life may be over with it
            return found
        self._runner.advance()
        return self._runner.node.state.transfers.get(transfer_id)

    async def wait_many(
        self, transfer_ids: Sequence[str], condition: Condition, least: int, timeout_s: float
    ) -> dict[str, Transfer | None]:
        """The transfers as they are when `condition` holds of at least so many of them, or when the time is over. An
        unknown one is None, and counts: nothing can become of it.
        """
        found = {id_: self._runner.node.state.transfers.find(id_) for id_ in transfer_ids}
        left = least - sum(1 for transfer in found.values() if transfer is None or condition(transfer))
        if left <= 0 or timeout_s <= 0:
            return found
        loop = asyncio.get_running_loop()
        enough: asyncio.Future[Transfer | None] = loop.create_future()
        entries: dict[str, tuple[Condition, asyncio.Future[Transfer | None]]] = {}

        def met(future: "asyncio.Future[Transfer | None]") -> None:
            nonlocal left
            if future.cancelled():
                return
            transfer = future.result()
            if transfer is not None:
                found[transfer.id] = transfer
            left -= 1
            if left <= 0 or transfer is None:
                _wake(enough)

        for id_, transfer in found.items():
            if transfer is not None and not condition(transfer):
                future: asyncio.Future[Transfer | None] = loop.create_future()
                future.add_done_callback(met)
                entries[id_] = condition, future
                self._waiters.setdefault(id_, []).append(entries[id_])
        timer = loop.call_later(timeout_s, _wake, enough)
        try:
            await enough
        finally:
            timer.cancel()
            for id_, entry in entries.items():
                self._leave(id_, entry)
        self._runner.advance()
        transfers = self._runner.node.state.transfers
        return {id_: transfers.find(id_) or seen for id_, seen in found.items()}  # its life may be over with it

    @contextmanager
    def watch(self, wanted: Condition, backlog: list[Transfer]) -> Iterator["Watch"]:
        """`backlog`, then every change from now on, as far as wanted. Raises Exhausted when too many watch."""
        history = self._runner.node.state.limits.transfer_history
        watch = Watch(wanted, backlog, max(1, history // PROGRESS_SHARE))
        with self._places.one():
            self._watches.append(watch)
            try:
                yield watch
            finally:
                self._watches.remove(watch)

    def _changed(self, transfer: Transfer) -> None:
        for condition, future in self._waiters.get(transfer.id, ()):
            if condition(transfer):
                _wake(future, transfer)
        for watch in self._watches:
            watch.add(transfer)

    def _life_over(self) -> None:
        """The transfers that were waited for are unknown now."""
        for waiters in self._waiters.values():
            for _, future in waiters:
                _wake(future)
        for watch in self._watches:
            watch.end()

    def _leave(self, transfer_id: str, entry: tuple[Condition, asyncio.Future[Transfer | None]]) -> None:
        waiters = self._waiters[transfer_id]
        waiters.remove(entry)
        if not waiters:
            del self._waiters[transfer_id]


def _wake(future: "asyncio.Future[Transfer | None]", transfer: Transfer | None = None) -> None:
    if not future.done():
        future.set_result(transfer)


class Watch:
    """What one watcher has not been told yet. It is told how far it is after `progress` changes that it did not want,
    and when `backlog` is over.
    """

    def __init__(self, wanted: Condition, backlog: list[Transfer], progress: int) -> None:
        self._wanted = wanted
        self._progress = progress
        self._queue = deque(News(transfer.seq, transfer) for transfer in backlog if wanted(transfer))
        if backlog and (not self._queue or self._queue[-1].seq < backlog[-1].seq):
            self._queue.append(News(backlog[-1].seq, None))
        self._unwanted = 0
        self._news = asyncio.Event()
        self._overflow = False
        self._over = False

    def add(self, transfer: Transfer) -> None:
        """A change, wanted or not."""
        wanted = self._wanted(transfer)
        self._unwanted = 0 if wanted else self._unwanted + 1
        if self._overflow or self._over or not (wanted or self._unwanted >= self._progress):
            return
        if self._queue and self._queue[-1].transfer is None:
            self._queue.pop()  # what comes now says more
        self._overflow = len(self._queue) >= WATCH_BACKLOG_MAX
        self._queue.append(News(transfer.seq, transfer if wanted else None))
        self._unwanted = 0
        self._news.set()

    def end(self) -> None:
        """The life whose changes it watches is over."""
        self._over = True
        self._news.set()

    async def next(self) -> News:
        """The next news, in order. Raises Exhausted for a watcher that is too slow, and Aborted after the last change
        of its life.
        """
        while not self._queue:
            if self._over:
                raise Aborted(
                    Reason.INCARNATION_CHANGED, "the life that this watch belongs to is over; watch the next one"
                )
            self._news.clear()
            await self._news.wait()
        if self._overflow and len(self._queue) == 1:
            raise Exhausted(Reason.LIMIT_EXCEEDED, "this watch fell too far behind; resume it", retry_delay_s=0.1)
        return self._queue.popleft()
