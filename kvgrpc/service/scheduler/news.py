"""News for a scheduler: kept until it says that it has them, told again until then."""

import asyncio
from collections.abc import Callable, Iterator

from kvgrpc.core.policy.values import News, Provisional
from kvgrpc.errors import Aborted, Reason, invalid

NEWS_MAX = 65_536
"""With so many that were not read no new requests are taken: those that are known may still come to their ends."""


class NewsLog:
    """The news of one life of the engine; `begin` starts the next one."""

    def __init__(self, kept: Callable[[int, News | None], None] = lambda *_: None) -> None:
        """`kept` gets each news by its number, and None when it is kept no more."""
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
        """Something happened now."""
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
        """All up to that number are known to the scheduler. Raises InvalidRequest for one that there was not yet."""
        if seq > self._last:
            raise invalid("after_seq", f"is past the last news, which has number {self._last}")
        while self._rows and (first := next(iter(self._rows))) <= seq:
            news = self._rows.pop(first)
            self._kept(first, None)
            if self._provisional.get(news.request_id) == first:
                del self._provisional[news.request_id]

    def unread(self) -> Iterator[tuple[int, News]]:
        """With their numbers, oldest first."""
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
        """A new life: nothing is known of the old one."""
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
