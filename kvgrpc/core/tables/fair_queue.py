"""The fair queue: items of callers, of whom nobody gets more by having more of them in the queue.

Each caller has a clock, which goes on by the cost of each of its items. A caller with `MANY` more in the queue pays
once more, so that one with few does not wait for those with many. The next item is of the caller whose clock is lowest,
and of equal clocks the one that has been so for longest. A caller that comes begins after the last item: nobody saves a
share up, and ever new callers do not keep those that wait from their shares.

Of one caller the oldest item goes first. If that one is late, the newest goes first: the caller still waits for the
newest, and mostly not for the oldest. `take_late` takes the oldest out.
"""

import heapq
from collections import OrderedDict
from itertools import count
from typing import Generic, TypeVar

_Item = TypeVar("_Item")

MANY = 8
"""Number of a caller's items for which each of them costs its cost once more."""
CLOCKS_MIN = 64
"""Minimum number of remembered clocks before those that are behind are looked for."""


class FairQueue(Generic[_Item]):
    """Items by their callers. All times are in seconds."""

    def __init__(self) -> None:
        self._waiting: dict[str, OrderedDict[_Item, tuple[float, float]]] = {}
        """Items in the order in which they came, each with its cost and its time, by caller. A caller here may have no
        item left until its next one would be due.
        """
        self._order: list[tuple[float, int, str]] = []
        """Heap of the clocks of all callers in `_waiting`, one for each, with a number that grows."""
        self._numbers = count()
        self._clocks: dict[str, float] = {}
        """Clocks of callers that are not in `_waiting`. Some are behind the lowest."""
        self._entry = 0.0
        """Minimum clock of a caller that comes: one past the last item's."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def count_of(self, caller: str) -> int:
        """Returns the number of a caller's items."""
        return len(self._waiting.get(caller, ()))

    @property
    def clocks_kept(self) -> int:
        """Number of callers without an item whose clocks are remembered."""
        return len(self._clocks) + sum(not items for items in self._waiting.values())

    def join(self, caller: str, item: _Item, cost: float, now: float) -> None:
        """Adds an item, which must not be in the queue. It costs 1 or more."""
        items = self._waiting.get(caller)
        if items is None:
            items = self._waiting[caller] = OrderedDict()
            clock = max(self._entry, self._clocks.pop(caller, 0.0))
            heapq.heappush(self._order, (clock, next(self._numbers), caller))
        items[item] = (cost, now)
        self._count += 1

    def leave(self, caller: str, item: _Item) -> None:
        """Takes an item out, if it is in the queue."""
        items = self._waiting.get(caller)
        if items is not None and items.pop(item, None) is not None:
            self._count -= 1
            if not self._count:
                self._forget()

    def next(self, late: float) -> tuple[str, _Item]:
        """Takes the next item out. Returns its caller and the item. A caller whose oldest item joined before `late` has
        its newest taken. There must be an item.
        """
        while not self._waiting[self._order[0][2]]:
            self._retire(self._order[0][0])
        clock, _, caller = self._order[0]
        self._entry = clock + 1.0
        items = self._waiting[caller]
        _, since = next(iter(items.values()))
        item, (cost, _) = items.popitem(last=since < late)
        self._count -= 1
        clock += cost * (1.0 + len(items) / MANY)
        if items:
            heapq.heapreplace(self._order, (clock, next(self._numbers), caller))
        else:
            self._retire(clock)
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

    def _retire(self, clock: float) -> None:
        """Takes the caller on top of the heap out, and remembers its clock."""
        _, _, caller = heapq.heappop(self._order)
        del self._waiting[caller]
        self._clocks[caller] = clock
        if not self._order:
            self._forget()
        elif len(self._clocks) > 2 * len(self._order) + CLOCKS_MIN:
            lowest = self._order[0][0]
            self._clocks = {name: at for name, at in self._clocks.items() if at > lowest}

    def _forget(self) -> None:
        """Forgets all callers, because nobody waits."""
        self._waiting.clear()
        self._order.clear()
        self._clocks.clear()
        self._entry = 0.0
