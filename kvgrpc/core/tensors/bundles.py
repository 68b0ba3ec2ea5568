"""Which tensors go to their consumers together: a bundle costs little more than one tensor, so that what waits goes at
once.

Rules:
* Nobody waits while nothing is under way, nor longer than 10 ms, nor where no other one would fit in.
* What waits goes in its order, as many as a bundle holds; one that is larger goes by itself.
"""

from collections.abc import Hashable, Sequence
from itertools import takewhile
from typing import Generic, TypeVar

from kvgrpc.core.tensors.values import Named
from kvgrpc.errors import OutOfRange, Reason, invalid

WAIT_S = 0.01
"""About what the first bytes of a send take."""
TENSORS_MAX = 32
"""Of a bundle: with the longest names and descriptions they fit into a request that is kept while its call stands."""
SHARE = 2
"""Of so many pages of a consumer's store a bundle takes one, at most: so that one comes while another one is used."""
BYTES_MAX = 64 * 1024 * 1024
"""Of a bundle: more at once is no faster."""

Route = TypeVar("Route", bound=Hashable)
Row = TypeVar("Row", bound=Hashable)


class _Waiting(Generic[Row]):
    """Of one route."""

    def __init__(self) -> None:
        self.under_way = 0
        self.rows: dict[Row, int] = {}
        """What waits, with its pages."""
        self.since = 0.0
        """When it began to wait, or the last send began."""

    def full(self, most_pages: int) -> bool:
        """Whether one more like the last one does not go with them."""
        pages = self.rows.values()
        return bool(pages) and (len(pages) >= TENSORS_MAX or sum(pages) + next(reversed(pages)) > most_pages)


class Gathering(Generic[Route, Row]):
    """What waits on each route; a route is what all that may go together has in common."""

    def __init__(self) -> None:
        self._routes: dict[Route, _Waiting[Row]] = {}
        """Those on which something waits or is under way."""
        self._queued: dict[Route, None] = {}
        """Those on which something waits, in the order of their `since`."""

    def __len__(self) -> int:
        return len(self._routes)

    def add(self, route: Route, row: Row, pages: int, now: float) -> None:
        """One more that is to go."""
        waiting = self._routes.setdefault(route, _Waiting())
        if not waiting.rows:
            waiting.since = now
            self._queued[route] = None
        waiting.rows[row] = pages

    def discard(self, route: Route, row: Row) -> bool:
        """It is to go no more; whether it was waiting."""
        waiting = self._routes.get(route)
        if waiting is None or waiting.rows.pop(row, None) is None:
            return False
        self._drop(route, waiting)
        return True

    def take(self, route: Route, most_pages: int, now: float) -> list[Row]:
        """What goes now, together, and is under way until `ended`; nothing where its turn has not come."""
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
        """A send that `take` began is over."""
        waiting = self._routes[route]
        waiting.under_way -= 1
        self._drop(route, waiting)

    def due(self, now: float) -> list[Route]:
        """Routes on which something has waited long enough."""
        return list(takewhile(lambda route: self._routes[route].since + WAIT_S <= now, self._queued))

    def next_deadline(self) -> float | None:
        """When one is due."""
        first = next(iter(self._queued), None)
        return None if first is None else self._routes[first].since + WAIT_S

    def _drop(self, route: Route, waiting: _Waiting[Row]) -> None:
        if not waiting.rows:
            self._queued.pop(route, None)
            if not waiting.under_way:
                del self._routes[route]


def check_bundle(tensors: Sequence[Named], pages: int, store_pages: int) -> None:
    """Raises OutOfRange (LIMIT_EXCEEDED) for a bundle whose pages are more than its share of a store, InvalidRequest
    (INVALID_FIELD) for one that names a tensor twice.
    """
    most = store_pages // SHARE
    if pages > most:
        text = f"a bundle takes at most {most} pages here"
        raise OutOfRange(Reason.LIMIT_EXCEEDED, text, metadata={"limit": str(most)})
    if len({tensor.id for tensor in tensors}) < len(tensors):
        raise invalid("bundled_tensors", "names a tensor twice")
