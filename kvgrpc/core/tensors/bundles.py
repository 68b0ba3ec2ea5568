"""Gathers tensors that go to their consumers together. A bundle costs little more than one tensor, so all that waits
goes at once.

Rules:
* No tensor waits while nothing is under way, or longer than 10 ms, or when no other one would fit in.
* Waiting tensors go in order, as many as a bundle holds. A larger one goes by itself.
"""

from collections.abc import Hashable, Sequence
from itertools import takewhile
from typing import Generic, TypeVar

from kvgrpc.core.tensors.descriptions import NamedTensor
from kvgrpc.errors import invalid, too_many

WAIT_S = 0.01
"""Maximum wait in seconds, about the time that the first bytes of a send take."""
TENSORS_MAX = 32
"""Maximum number of tensors of a bundle. With the longest names and descriptions they fit into a request that is kept
while its call stands.
"""
SHARE = 2
"""A bundle takes at most one in `SHARE` pages of a consumer's store, so the next one can come while one is used."""
BYTES_MAX = 64 * 1024 * 1024
"""Maximum size of a bundle in bytes. More at once is no faster."""

Route = TypeVar("Route", bound=Hashable)
Row = TypeVar("Row", bound=Hashable)


class _RouteQueue(Generic[Row]):
    """The waiting rows of one route."""

    def __init__(self) -> None:
        self.under_way = 0
        self.rows: dict[Row, int] = {}
        """Waiting rows -> their pages."""
        self.since = 0.0
        """Time at which the first row began to wait, or the last send began."""

    def full(self, most_pages: int) -> bool:
        """Returns whether one more row like the last one would not fit."""
        pages = self.rows.values()
        return bool(pages) and (len(pages) >= TENSORS_MAX or sum(pages) + next(reversed(pages)) > most_pages)


class BundleQueue(Generic[Route, Row]):
    """The waiting rows of all routes. A route is what rows that may go together have in common."""

    def __init__(self) -> None:
        self._routes: dict[Route, _RouteQueue[Row]] = {}
        """Routes on which a row waits or is under way."""
        self._queued: dict[Route, None] = {}
        """Routes on which a row waits, in the order of their `since`."""

    def __len__(self) -> int:
        return len(self._routes)

    def add(self, route: Route, row: Row, pages: int, now: float) -> None:
        waiting = self._routes.setdefault(route, _RouteQueue())
        if not waiting.rows:
            waiting.since = now
            self._queued[route] = None
        waiting.rows[row] = pages

    def discard(self, route: Route, row: Row) -> bool:
        """Removes a row that is to go no more. Returns whether it was waiting."""
        waiting = self._routes.get(route)
        if waiting is None or waiting.rows.pop(row, None) is None:
            return False
        self._drop(route, waiting)
        return True

    def take(self, route: Route, most_pages: int, now: float) -> list[Row]:
        """Returns the rows that go together now, and counts them as under way until `ended`. Empty while it is not
        their turn.
        """
        waiting = self._routes.get(route)
        if waiting is None or not (not waiting.under_way or waiting.since + WAIT_S <= now or waiting.full(most_pages)):
            return []
        taken: list[Row] = []
        for row, pages in waiting.rows.items():
            most_pages -= pages
            if taken and (most_pages < 0 or len(taken) == TENSORS_MAX):
                break
            taken.append(row)
        for row in taken:
            del waiting.rows[row]
        if taken:
            waiting.under_way += 1
            waiting.since = now
            del self._queued[route]
            if waiting.rows:
                self._queued[route] = None
        return taken

    def ended(self, route: Route) -> None:
        """Ends a send that `take` began."""
        waiting = self._routes[route]
        waiting.under_way -= 1
        self._drop(route, waiting)

    def due(self, now: float) -> list[Route]:
        """Returns the routes on which a row has waited long enough."""
        return list(takewhile(lambda route: self._routes[route].since + WAIT_S <= now, self._queued))

    def next_deadline(self) -> float | None:
        """Returns the time at which the first route is due, or None."""
        first = next(iter(self._queued), None)
        return None if first is None else self._routes[first].since + WAIT_S

    def _drop(self, route: Route, waiting: _RouteQueue[Row]) -> None:
        if not waiting.rows:
            self._queued.pop(route, None)
            if not waiting.under_way:
                del self._routes[route]


def check_bundle(tensors: Sequence[NamedTensor], pages: int, store_pages: int) -> None:
    """Raises OutOfRange (LIMIT_EXCEEDED) for a bundle whose pages exceed its share of a store, and InvalidRequest
    (INVALID_FIELD) for a bundle that names a tensor twice.
    """
    most = store_pages // SHARE
    if pages > most:
        raise too_many(f"a bundle takes at most {most} pages here", most)
    if len({tensor.id for tensor in tensors}) < len(tensors):
        raise invalid("bundled_tensors", "names a tensor twice")
