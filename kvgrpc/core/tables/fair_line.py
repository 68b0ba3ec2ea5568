"""The fair line: items that wait for a turn, of callers that get equal shares, however many items each of them has.

Each caller has a clock, which goes on by the cost of each of its turns. The next turn is that of the caller whose clock
is lowest. A caller that comes back begins at the clock of the last turn. So nobody saves turns up, and a caller that
seldom comes goes before those that always wait.

Turns of one caller go to its oldest item. If that one is late, turns go to the newest: the caller still waits for the
newest, and mostly not for the oldest. `take_late` takes the oldest out.
"""

import heapq
from collections import OrderedDict
from typing import Generic, TypeVar

_Item = TypeVar("_Item")

CLOCKS_MIN = 64
"""Minimum number of remembered clocks before those that are behind are looked for."""


class FairLine(Generic[_Item]):
    """Items that wait, by their callers. All times are in seconds."""

    def __init__(self) -> None:
        self._waiting: dict[str, OrderedDict[_Item, tuple[float, float]]] = {}
        """Items in the order in which they came, each with its cost and its time, by caller; a caller has some, or it
        had some at its last turn.
        """
        self._order: list[tuple[float, str]] = []
        """Heap of the clocks of all callers in `_waiting`, one for each."""
        self._clocks: dict[str, float] = {}
        """Clocks of callers that are not in line, by caller. Some are behind the last turn."""
        self._clock = 0.0
        """Clock of the caller that had the last turn, at its beginning."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def count_of(self, caller: str) -> int:
        """Returns the number of a caller's items."""
        return len(self._waiting.get(caller, ()))

    def join(self, caller: str, item: _Item, cost: float, now: float) -> None:
        """Adds an item whose turn has a cost. The item must not be in line."""
        items = self._waiting.get(caller)
        if items is None:
            items = self._waiting[caller] = OrderedDict()
            heapq.heappush(self._order, (max(self._clock, self._clocks.pop(caller, 0.0)), caller))
        items[item] = (cost, now)
        self._count += 1

    def leave(self, caller: str, item: _Item) -> None:
        """Takes an item out, if it is in line."""
        items = self._waiting.get(caller)
        if items is not None and items.pop(item, None) is not None:
            self._count -= 1

    def next(self, late: float) -> tuple[str, _Item]:
        """Takes out the item whose turn it is. Returns its caller and the item. `late`: the time of an oldest item
        before which its caller's newest goes first. There must be an item.
        """
        while not self._waiting[self._order[0][1]]:
            self._retire(*self._order[0])
        self._clock, caller = self._order[0]
        items = self._waiting[caller]
        _, since = next(iter(items.values()))
        item, (cost, _) = items.popitem(last=since < late)
        self._count -= 1
        if items:
            heapq.heapreplace(self._order, (self._clock + cost, caller))
        else:
            self._retire(self._clock + cost, caller)
        return caller, item

    def take_late(self, caller: str, late: float) -> _Item | None:
        """Takes a caller's oldest item out if it joined before `late`. Returns it, or None."""
        items = self._waiting.get(caller)
        if not items:
            return None
        item, (_, since) = next(iter(items.items()))
        if since >= late:
            return None
        del items[item]
        self._count -= 1
        return item

    def _retire(self, clock: float, caller: str) -> None:
        """Takes the caller on top of the heap out of the line, and remembers its clock."""
        heapq.heappop(self._order)
        del self._waiting[caller]
        self._clocks[caller] = clock
        if not self._order:
            self._clocks.clear()
            self._clock = 0.0
        elif len(self._clocks) > 2 * len(self._order) + CLOCKS_MIN:
            self._clocks = {name: at for name, at in self._clocks.items() if at > self._clock}
