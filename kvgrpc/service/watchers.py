"""Waiters and watches on transfers: changes wake them, never a timer of their own."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from kvgrpc.core.tables.transfers import Transfer
from kvgrpc.core.values.owners import Ground, Verb
from kvgrpc.errors import Aborted, Exhausted, Reason
from kvgrpc.service.callers import PRINCIPAL
from kvgrpc.service.places import Places
from kvgrpc.service.runner import Runner

WATCHES_MAX = 256
WATCHES_OF_CONNECTION_MAX = 64
WATCH_BACKLOG_MAX = 8_192
"""Maximum number of changes that a slow watcher may be behind; it resumes from the log afterwards."""

PROGRESS_SHARE = 4
"""Divisor of the history's length: after so many unwanted changes a watcher gets a number to resume after."""

WAITED_MAX = 512
"""Maximum number of transfers in one call or filter: their ids fit into a request that may stand."""
WAITED_OF_ALL_MAX = 65_536
"""Maximum number of transfers that all calls of WaitTransfers wait for together."""

Condition = Callable[[Transfer], bool]
Waiter = tuple[Condition, Callable[[Transfer | None], None]]
"""Condition and callback of a waiter. The callback gets None when the life of the transfer is over."""


class News(NamedTuple):
    """One message for a watcher: a change, or only how far it is if no recent change was for it."""

    seq: int
    """Number to resume after: everything up to it was told."""
    transfer: Transfer | None


class Watchers:
    """All callers that wait for transfers of this server."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._waiters: dict[str, list[Waiter]] = {}
        self._waited = 0
        self._watches: list[TransferWatcher] = []
        share = runner.node.state.limits.of_tenant(WATCHES_MAX)
        self._places = Places("watches", WATCHES_OF_CONNECTION_MAX, WATCHES_MAX, 1.0, own=0, of_tenant=share)
        runner.on_transfer.append(self._changed)
        runner.on_life.append(self._life_over)

    async def wait(self, transfer_id: str, condition: Condition, timeout_s: float) -> Transfer:
        """Returns the transfer when `condition` begins to hold, or when the time is over. Raises NotFound."""
        transfer = self._get(transfer_id)
        if condition(transfer):
            return transfer
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Transfer | None] = loop.create_future()
        entry: Waiter = (condition, partial(_wake, future))
        self._waiters.setdefault(transfer_id, []).append(entry)
        timer = loop.call_later(timeout_s, _wake, future)
        try:
            found = await future
        finally:
            timer.cancel()
            self._leave(transfer_id, entry)
        if found is not None:  # not looked up again: its life may be over with it
            return found
        self._runner.advance()
        return self._get(transfer_id)

    def _get(self, transfer_id: str) -> Transfer:
        """Returns a transfer of the served call's tenant. Raises NotFound."""
        return self._runner.node.state.transfers.get_for(PRINCIPAL.get(), Verb.SEE, transfer_id, Ground.NAME)

    def _find(self, transfer_id: str) -> Transfer | None:
        transfers = self._runner.node.state.transfers
        may = transfers.may(PRINCIPAL.get(), Verb.SEE, transfer_id, Ground.NAME)
        return transfers.find(transfer_id) if may else None

    async def wait_many(
        self, transfer_ids: Sequence[str], condition: Condition, least: int, timeout_s: float
    ) -> dict[str, Transfer | None]:
        """Returns the transfers when `condition` holds for at least `least` of them, or when the time is over. An
        unknown one is None, and counts: nothing can become of it. Raises Exhausted if too many are waited for.
        """
        found = {id_: self._find(id_) for id_ in transfer_ids}
        pending = {id_ for id_, transfer in found.items() if transfer is not None and not condition(transfer)}
        may_pend = len(found) - least
        if len(pending) <= may_pend or timeout_s <= 0:
            return found
        if self._waited + len(pending) > WAITED_OF_ALL_MAX:
            message = f"{self._waited} transfers are waited for; the limit is {WAITED_OF_ALL_MAX}: come back later"
            limit = {"limit": str(WAITED_OF_ALL_MAX)}
            raise Exhausted(Reason.LIMIT_EXCEEDED, message, retry_delay_s=1.0, metadata=limit)
        loop = asyncio.get_running_loop()
        enough: asyncio.Future[Transfer | None] = loop.create_future()

        def met(transfer: Transfer | None) -> None:
            if transfer is None:  # all transfers are unknown now
                _wake(enough)
            elif transfer.id in pending:
                pending.discard(transfer.id)
                found[transfer.id] = transfer
                if len(pending) <= may_pend:
                    _wake(enough)

        entry: Waiter = (condition, met)
        waited = list(pending)
        self._waited += len(waited)
        for id_ in waited:
            self._waiters.setdefault(id_, []).append(entry)
        timer = loop.call_later(timeout_s, _wake, enough)
        try:
            await enough
        finally:
            timer.cancel()
            self._waited -= len(waited)
            for id_ in waited:
                self._leave(id_, entry)
        self._runner.advance()
        # A transfer that met the condition is told as it was then, even if its life is over; others as they are now.
        return {id_: self._find(id_) or (None if id_ in pending else seen) for id_, seen in found.items()}

    @contextmanager
    def watch(self, wanted: Condition, backlog: list[Transfer]) -> Iterator["TransferWatcher"]:
        """Yields a watch of `backlog`, then of every wanted change from now on. Raises Exhausted if too many watch."""
        history = self._runner.node.state.limits.transfer_history
        watch = TransferWatcher(wanted, backlog, max(1, history // PROGRESS_SHARE))
        with self._places.one():
            self._watches.append(watch)
            try:
                yield watch
            finally:
                self._watches.remove(watch)

    def _changed(self, transfer: Transfer) -> None:
        for condition, wake in self._waiters.get(transfer.id, ()):
            if condition(transfer):
                wake(transfer)
        for watch in self._watches:
            watch.add(transfer)

    def _life_over(self) -> None:
        """Wakes all waiters: their transfers are unknown now."""
        for waiters in self._waiters.values():
            for _, wake in waiters:
                wake(None)
        for watch in self._watches:
            watch.end()

    def _leave(self, transfer_id: str, entry: Waiter) -> None:
        waiters = self._waiters[transfer_id]
        waiters.remove(entry)
        if not waiters:
            del self._waiters[transfer_id]


def _wake(future: "asyncio.Future[Transfer | None]", transfer: Transfer | None = None) -> None:
    if not future.done():
        future.set_result(transfer)


class TransferWatcher:
    """The news that one watcher has not been told yet. The watcher is told how far it is after `progress` unwanted
    changes, and at the end of `backlog`.
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
        """Takes a change, wanted or not."""
        wanted = self._wanted(transfer)
        self._unwanted = 0 if wanted else self._unwanted + 1
        if self._overflow or self._over or not (wanted or self._unwanted >= self._progress):
            return
        if self._queue and self._queue[-1].transfer is None:
            self._queue.pop()  # the new entry says more
        self._overflow = len(self._queue) >= WATCH_BACKLOG_MAX
        self._queue.append(News(transfer.seq, transfer if wanted else None))
        self._unwanted = 0
        self._news.set()

    def end(self) -> None:
        """Ends the watch: the life whose changes it watches is over."""
        self._over = True
        self._news.set()

    async def next(self) -> News:
        """Returns the next news, in order. Raises Exhausted for a watcher that is too slow, and Aborted after the last
        change of its life.
        """
        while not self._queue:
            if self._over:
                raise Aborted(
                    Reason.INCARNATION_CHANGED, "the life that this watch belongs to is over; watch the next one"
                )
            self._news.clear()
            await self._news.wait()
        if self._overflow and len(self._queue) == 1:
            behind = "this watch fell too far behind; resume it"
            limit = {"limit": str(WATCH_BACKLOG_MAX)}
            raise Exhausted(Reason.LIMIT_EXCEEDED, behind, retry_delay_s=0.1, metadata=limit)
        return self._queue.popleft()
