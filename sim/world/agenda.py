"""Virtual time: runs deeds in the order of (time, sequence)."""

import heapq
from collections.abc import Callable
from itertools import count

Deed = Callable[[], None]


class Agenda:
    """All deeds that are still to come. Virtual time passes only between deeds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        """Number of deeds done so far."""
        self._queue: list[tuple[float, int, Deed]] = []
        self._order = count()

    @property
    def idle(self) -> bool:
        """True if nothing is left to do."""
        return not self._queue

    def at(self, when: float, do: Deed) -> None:
        """Schedules `do` at `when`, after all deeds scheduled earlier for that time; now, if `when` is past."""
        heapq.heappush(self._queue, (max(when, self.now), next(self._order), do))

    def after(self, delay_s: float, do: Deed) -> None:
        """Schedules `do` after a delay."""
        self.at(self.now + delay_s, do)

    def run(self, until: float, go_on: Callable[[], bool] = lambda: True) -> bool:
        """Runs all deeds that are due up to `until`, while `go_on` returns True after each. Returns True if nothing is
        left at all.
        """
        queue = self._queue
        while queue and queue[0][0] <= until:
            self.now, _, do = heapq.heappop(queue)
            self.events += 1
            do()
            if not go_on():
                break
        return not queue
