"""The waiting line for the pages of a store.

Rules:
* Tensors that the engine waits for go first, otherwise first come, first served. None overtakes one that does not fit.
* Other tensors leave a part of the store free, so an engine that waits for a tensor gets it, however many came before.
  A bundle leaves that part free too, unless the engine waits for all of it.
* A refused tensor keeps its place for a while, because it is to come again.
"""

from dataclasses import dataclass

from kvgrpc.core.tensors.descriptions import TensorId

RESERVED = 8
"""One page in `RESERVED` is kept for tensors that the engine waits for."""
KEPT_S = 1.0
"""Time in seconds for which a refused tensor keeps its place. It was told to come again much sooner."""
ABSENT_MAX = 4_096
"""Maximum number of places kept for refused tensors. The next refused one loses its place."""


@dataclass(eq=False)
class LinePlace:
    """The place of one tensor or bundle in the line."""

    id: TensorId
    pages: int
    urgent: bool
    """True when the engine waits for it, or for one tensor of the bundle."""
    whole: bool = True
    """False for a bundle of which the engine waits for some tensors only."""
    absent_until: float | None = None
    """Time until which a refused tensor may come again. None while its caller waits in the line."""


class Line:
    """The waiting line of one store."""

    def __init__(self, pages: int) -> None:
        self._pages = pages
        self.reserved = pages // RESERVED
        self._first: dict[LinePlace, None] = {}
        """Places of tensors that the engine waits for, in order."""
        self._others: dict[LinePlace, None] = {}
        self.places: dict[TensorId, LinePlace] = {}
        """All places. Read-only outside."""
        self._absent = 0

    def __len__(self) -> int:
        return len(self.places)

    def join(self, id_: TensorId, pages: int, *, urgent: bool) -> LinePlace:
        """Returns the place of a tensor: the last one, or the one kept for it. Its number of pages may be a new one."""
        place = self.places.get(id_)
        if place is None:
            place = self.places[id_] = LinePlace(id_, pages, urgent)
            self._row(place)[place] = None
        elif place.absent_until is not None:
            place.absent_until = None
            self._absent -= 1
        place.pages = pages
        if urgent:
            self.hurry(id_)
        return place

    def hurry(self, id_: TensorId) -> None:
        """Moves a tensor to those that the engine waits for."""
        place = self.places.get(id_)
        if place is not None and not place.urgent:
            del self._others[place]
            place.urgent = True
            self._first[place] = None

    def leave(self, place: LinePlace) -> None:
        """Removes a place that has its pages or wants none any more. Idempotent."""
        if self.places.get(place.id) is place:
            del self.places[place.id]
            del self._row(place)[place]
            if place.absent_until is not None:
                self._absent -= 1

    def refuse(self, place: LinePlace, now: float) -> None:
        """Keeps the place of a refused tensor until it comes again."""
        if self._absent >= ABSENT_MAX:
            self.leave(place)
        else:
            place.absent_until = now + KEPT_S
            self._absent += 1

    def head(self, now: float) -> LinePlace | None:
        """Returns the place whose turn it is, which may be absent. Removes places that were kept for too long."""
        for row in (self._first, self._others):
            while row:
                place = next(iter(row))
                if place.absent_until is None or place.absent_until > now:
                    return place
                self.leave(place)
        return None

    def lacks(self, place: LinePlace, free: int) -> int:
        """Returns the number of pages that must come free before this place gets its own."""
        wanted = place.pages if place.urgent and place.whole else min(place.pages + self.reserved, self._pages)
        return max(wanted - free, 0)

    def _row(self, place: LinePlace) -> dict[LinePlace, None]:
        return self._first if place.urgent else self._others
