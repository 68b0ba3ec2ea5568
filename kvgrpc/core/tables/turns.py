"""Turns of moves that move bytes: higher priority first, then in the order of asking.

A posting cannot be called back, so few bytes are posted at a time. Once the bytes in flight of a rank reach the bound,
all others wait here. The next turn goes to the most important one, not to the one that was posted first.
"""

import heapq
from itertools import count


class Turns:
    """Turns of all moves of one engine, by the moves' names."""

    def __init__(self, in_flight_bytes: int) -> None:
        self._most = in_flight_bytes
        self._in_flight: dict[str, int] = {}
        self.waiting: dict[str, int] = {}
        """Waiting moves, by name -> heap entry number. Other heap entries are stale. Read-only outside."""
        self._heap: list[tuple[int, int, str]] = []
        self._order = count()
        self.paused = False
        """True while no move gets a turn. Bytes in flight go on."""
        self._named = ""
        """The move `next` returned last, until it calls `take`."""
        self.nbytes = 0
        """Bytes in flight. Read-only outside."""

    def take(self, name: str, priority: int) -> bool:
        """Returns whether it is that move's turn. If not, the move waits, and asks again when `next` returns it."""
        if name == self._named:
            self._named = ""
            return True
        if name in self.waiting:
            return False
        if (
            not self.paused
            and self.nbytes < self._most
            and not (self._first() is not None and -self._heap[0][0] >= priority)
        ):
            return True
        number = self.waiting[name] = next(self._order)
        heapq.heappush(self._heap, (-priority, number, name))
        return False

    def left(self) -> dict[str, int]:
        """Returns the numbers of moves with bytes in flight and of waiting moves."""
        return {"in_flight": len(self._in_flight), "waiting": len(self.waiting)}

    def began(self, name: str, nbytes: int) -> None:
        """Counts a move's bytes as in flight."""
        self._in_flight[name] = self._in_flight.get(name, 0) + nbytes
        self.nbytes += nbytes

    def ended(self, name: str) -> None:
        """Counts a move's bytes as no longer in flight."""
        self.nbytes -= self._in_flight.pop(name, 0)

    def leave(self, name: str) -> None:
        """Forgets a move that is over: it does not wait, and its bytes in flight keep no other move waiting."""
        self.waiting.pop(name, None)
        self.ended(name)

    def next(self) -> str | None:
        """Returns the move whose turn it is, and ends its wait. Returns None when none waits or there is no room."""
        name = self._first() if self.nbytes < self._most and not self.paused else None
        if name is not None:
            heapq.heappop(self._heap)
            del self.waiting[name]
        self._named = name or ""
        return name

    def _first(self) -> str | None:
        while self._heap and self.waiting.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None
