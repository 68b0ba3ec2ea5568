"""Turns of moves that move bytes: higher priority first, then in the order of asking.

What is posted cannot be called back, so little is: once the bytes in flight of a rank reach the bound, all others wait
here, and the next turn goes to the most important one of them, not to the one that happened to be posted first.
"""

import heapq
from itertools import count


class Turns:
    """Turns of all moves of one engine, by the moves' names."""

    def __init__(self, in_flight_bytes: int) -> None:
        self._most = in_flight_bytes
        self._in_flight: dict[str, int] = {}
        self._waiting: dict[str, int] = {}
        """Those that wait, with the number of their entry in the heap: other entries are of the past."""
        self._heap: list[tuple[int, int, str]] = []
        self._order = count()
        self.paused = False
        """No move has a turn; what is in flight ends."""
        self._named = ""
        """Whom `next` named last, until it takes its turn."""
        self.nbytes = 0
        """Bytes in flight; to be read only."""

    def take(self, name: str, priority: int) -> bool:
        """Whether it is that move's turn; else it waits, and `next` names it when it is: then it asks again."""
        if name == self._named:
            self._named = ""
            return True
        if name in self._waiting:
            return False
        if (
            not self.paused
            and self.nbytes < self._most
            and not (self._first() is not None and -self._heap[0][0] >= priority)
        ):
            return True
        number = self._waiting[name] = next(self._order)
        heapq.heappush(self._heap, (-priority, number, name))
        return False

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def left(self) -> dict[str, int]:
        """How many moves have bytes in flight, and how many wait."""
        return {"in_flight": len(self._in_flight), "waiting": len(self._waiting)}

    def began(self, name: str, nbytes: int) -> None:
        """Its bytes are in flight."""
        self._in_flight[name] = self._in_flight.get(name, 0) + nbytes
        self.nbytes += nbytes

    def ended(self, name: str) -> None:
        """Its bytes are in flight no more."""
        self.nbytes -= self._in_flight.pop(name, 0)

    def leave(self, name: str) -> None:
        """The move is over: it waits no more, and what it still has in flight keeps no other move waiting."""
        self._waiting.pop(name, None)
        self.ended(name)

    def next(self) -> str | None:
        """The move whose turn it is, which waits no more; None while there is none, or no room."""
        name = self._first() if self.nbytes < self._most and not self.paused else None
        if name is not None:
            heapq.heappop(self._heap)
            del self._waiting[name]
        self._named = name or ""
        return name

    def _first(self) -> str | None:
        while self._heap and self._waiting.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None
