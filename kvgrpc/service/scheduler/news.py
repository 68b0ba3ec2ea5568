"""News for a scheduler: kept, and told again, until the scheduler acknowledges them."""

import asyncio
from collections.abc import Callable, Iterator

from kvgrpc.core.policy.values import News, Provisional
from kvgrpc.errors import Aborted, Reason, invalid

NEWS_MAX = 65_536
"""Maximum number of unread news before new requests are refused. Known requests may still finish."""


class NewsLog:
    """The news of one life of the engine, for each owner of requests; `begin` starts the next life. All numbers are of
    one row, so an owner's news have gaps.
    """

    def __init__(self, kept: Callable[[int, News | None], None] = lambda *_: None) -> None:
        """`kept` gets each news with its number, and None when the news is dropped."""
        self._kept = kept
        self._rows: dict[str, dict[int, News]] = {}
        """Unread news by their owners; no owner has none."""
        self._last = 0
        self._provisional: dict[tuple[str, str], int] = {}
        """The number of the news about layers, by owner and request: the next one replaces it."""
        self._waiting: dict[asyncio.Future[None], str] = {}
        """Owners of the calls that wait."""
        self._life = 0

    def count(self, owner: str) -> int:
        """Returns how many news of that owner are unread."""
        return len(self._rows.get(owner, ()))

    def add(self, owner: str, news: News) -> None:
        self._last += 1
        rows = self._rows.setdefault(owner, {})
        rows[self._last] = news
        self._kept(self._last, news)
        if isinstance(news, Provisional):
            before = self._provisional.get((owner, news.request_id), 0)
            rows.pop(before, None)
            self._kept(before, None)
            self._provisional[owner, news.request_id] = self._last
        for future, waits in self._waiting.items():
            if waits == owner:
                _wake(future)

    def acknowledge(self, owner: str, seq: int) -> None:
        """Drops the owner's news up to that number. Raises InvalidRequest for a number that was not given yet."""
        if seq > self._last:
            raise invalid("after_seq", f"is past the last news, which has number {self._last}")
        rows = self._rows.get(owner, {})
        while rows and (first := next(iter(rows))) <= seq:
            news = rows.pop(first)
            self._kept(first, None)
            if self._provisional.get((owner, news.request_id)) == first:
                del self._provisional[owner, news.request_id]
        if not rows:
            self._rows.pop(owner, None)

    def unread(self, owner: str) -> Iterator[tuple[int, News]]:
        """Returns the owner's unread news with their numbers, oldest first."""
        return iter(self._rows.get(owner, {}).items())

    async def wait(self, owner: str, timeout_s: float) -> None:
        """Returns when the owner has news, or the time is over. Raises Aborted when the life is over."""
        if owner in self._rows or timeout_s <= 0:
            return
        loop, life = asyncio.get_running_loop(), self._life
        future: asyncio.Future[None] = loop.create_future()
        self._waiting[future] = owner
        timer = loop.call_later(timeout_s, _wake, future)
        try:
            await future
        finally:
            timer.cancel()
            del self._waiting[future]
        if self._life != life:
            raise Aborted(Reason.INCARNATION_CHANGED, "the life of the engine that was waited for is over: start over")

    def begin(self) -> None:
        """Starts a new life: all news of the old one are dropped."""
        self._rows.clear()
        self._provisional.clear()
        self._last = 0
        self._life += 1
        for future in self._waiting:
            _wake(future)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
