"""News for a scheduler: kept, and told again, until the scheduler acknowledges them."""

import asyncio
from collections.abc import Callable, Iterator

from kvgrpc.core.policy.values import News, Provisional
from kvgrpc.errors import Aborted, Reason, invalid

NEWS_MAX = 65_536
"""Maximum number of unread news before new requests are refused. Known requests may still finish."""


class NewsLog:
    """The news of one life of the engine; `begin` starts the next life."""

    def __init__(self, kept: Callable[[int, News | None], None] = lambda *_: None) -> None:
        """`kept` gets each news with its number, and None when the news is dropped."""
        self._kept = kept
        self._rows: dict[int, News] = {}
        self._last = 0
        self._provisional: dict[str, int] = {}
        """The number of each request's news about layers: the next one replaces it."""
        self._waiting: set[asyncio.Future[None]] = set()
        self._life = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, news: News) -> None:
        self._last += 1
        self._rows[self._last] = news
        self._kept(self._last, news)
        if isinstance(news, Provisional):
            before = self._provisional.get(news.request_id, 0)
            self._rows.pop(before, None)
            self._kept(before, None)
            self._provisional[news.request_id] = self._last
        self._wake_all()

    def acknowledge(self, seq: int) -> None:
        """Drops all news up to that number. Raises InvalidRequest for a number that was not given yet."""
        if seq > self._last:
            raise invalid("after_seq", f"is past the last news, which has number {self._last}")
        while self._rows and (first := next(iter(self._rows))) <= seq:
            news = self._rows.pop(first)
            self._kept(first, None)
            if self._provisional.get(news.request_id) == first:
                del self._provisional[news.request_id]

    def unread(self) -> Iterator[tuple[int, News]]:
        """Returns the unread news with their numbers, oldest first."""
        return iter(self._rows.items())

    async def wait(self, timeout_s: float) -> None:
        """Returns when there are news, or the time is over. Raises Aborted when the life is over."""
        if self._rows or timeout_s <= 0:
            return
        loop, life = asyncio.get_running_loop(), self._life
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.add(future)
        timer = loop.call_later(timeout_s, _wake, future)
        try:
            await future
        finally:
            timer.cancel()
            self._waiting.discard(future)
        if self._life != life:
            raise Aborted(Reason.INCARNATION_CHANGED, "the life of the engine that was waited for is over: start over")

    def begin(self) -> None:
        """Starts a new life: all news of the old one are dropped."""
        self._rows.clear()
        self._provisional.clear()
        self._last = 0
        self._life += 1
        self._wake_all()

    def _wake_all(self) -> None:
        for future in self._waiting:
            _wake(future)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
