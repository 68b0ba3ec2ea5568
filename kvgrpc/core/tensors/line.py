"""Who gets pages of a store next.

Rules:
* What the engine waits for goes first; otherwise who came first. Nobody overtakes one that does not fit yet.
* What nobody waits for leaves a part of the store free: an engine that waits for a tensor gets it, however many others
  came before it. So does a bundle of which it does not wait for all.
* Who is refused keeps its place for a while: it is to come again.
"""

from dataclasses import dataclass

from kvgrpc.core.tensors.values import TensorId

RESERVED = 8
"""One page of so many is for tensors that the engine waits for."""
KEPT_S = 1.0
"""How long a place is kept for one that was refused, and was told to come again much sooner."""
ABSENT_MAX = 4_096
"""Places that are kept at a time; the next one is not."""


@dataclass(eq=False)
class Place:
    """Of one tensor."""

    id: TensorId
    pages: int
    urgent: bool
    """The engine waits for it; of a bundle, for one of its tensors."""
    whole: bool = True
    """The engine waits for all of it, if it waits: not for some tensors of a bundle alone."""
    absent_until: float | None = None
    """Who has it was refused, and is to come again until then."""


class Line:
    """Of a store with so many pages."""

    def __init__(self, pages: int) -> None:
        self._pages = pages
        self.reserved = pages // RESERVED
        self._first: dict[Place, None] = {}
        """Those that the engine waits for, in order."""
        self._others: dict[Place, None] = {}
        self._of: dict[TensorId, Place] = {}
        self._absent = 0

    def __len__(self) -> int:
        return len(self._of)

    def join(self, id_: TensorId, pages: int, *, urgent: bool) -> Place:
        """The place of a tensor: the last one, or what was kept for it, for as many pages as it takes now."""
        place = self._of.get(id_)
        if place is None:
            place = self._of[id_] = Place(id_, pages, urgent)
            self._row(place)[place] = None
        elif place.absent_until is not None:
            place.absent_until = None
            self._absent -= 1
        place.pages = pages
        if urgent:
            self.hurry(id_)
        return place

    def hurry(self, id_: TensorId) -> None:
        """The engine waits for it from now on."""
        place = self._of.get(id_)
        if place is not None and not place.urgent:
            del self._others[place]
            place.urgent = True
            self._first[place] = None

    def leave(self, place: Place) -> None:
        """It has its pages, or wants none any more. Idempotent."""
        if self._of.get(place.id) is place:
            del self._of[place.id]
            del self._row(place)[place]
            if place.absent_until is not None:
                self._absent -= 1

    def refuse(self, place: Place, now: float) -> None:
        """It is to come again; its place is kept for it until then."""
        if self._absent >= ABSENT_MAX:
            self.leave(place)
        else:
            place.absent_until = now + KEPT_S
            self._absent += 1

    def head(self, now: float) -> Place | None:
        """Whose turn it is; it may be absent. Places that were kept for too long are given up."""
        for row in (self._first, self._others):
            while row:
                place = next(iter(row))
                if place.absent_until is None or place.absent_until > now:
                    return place
                self.leave(place)
        return None

    def lacks(self, place: Place, free: int) -> int:
        """Pages that must come free before this place gets its own."""
        wanted = place.pages if place.urgent and place.whole else min(place.pages + self.reserved, self._pages)
        return max(wanted - free, 0)

    def _row(self, place: Place) -> dict[Place, None]:
        return self._first if place.urgent else self._others
