"""Which leases are soft: live, neither firm nor claimed, so that the engine may take their blocks back at any time.

A lease is in one of three states here: known with the time at which it becomes soft, soft, or unknown (claimed, ended).
Heap entries may lag behind, as in `timers`: a stale one is dropped when it reaches the top, and when most are stale, a
heap is built anew.
"""

import heapq
from collections.abc import Generator, Iterator
from itertools import count

from kvgrpc.core.tables.leases import Lease, LeaseState
from kvgrpc.core.tables.timers import STALE_MIN

Entry = tuple[float, int, Lease]


class SoftLeases:
    """Leases of one life that nobody has claimed."""

    def __init__(self) -> None:
        self._firm: dict[str, float] = {}
        """Until when, by lease."""
        self._soft: dict[str, Lease] = {}
        self._by_end: list[Entry] = []
        self._by_age: list[Entry] = []
        self._order = count()
        self.reclaimed = 0
        """How many were taken back for their blocks."""
        self.reclaimed_in_vain = 0
        """How many of them a reader came for."""
        self.reclaimed_claims = 0
        """How many of them readers waited for."""

    def firm(self, lease: Lease) -> bool:
        """It becomes soft at its `firm_until`, unless it is claimed or ends. Whether it was soft."""
        was_soft = self._soft.pop(lease.id, None) is not None
        self._firm[lease.id] = lease.firm_until
        heapq.heappush(self._by_end, (lease.firm_until, next(self._order), lease))
        if len(self._by_end) > 2 * len(self._firm) + STALE_MIN:
            kept = {entry[2].id: entry for entry in self._by_end if self._firm.get(entry[2].id) == entry[0]}
            self._by_end = sorted(kept.values())
        return was_soft

    def take_out(self, lease: Lease) -> bool:
        """It is claimed, or has ended. Whether it was soft."""
        self._firm.pop(lease.id, None)
        return self._soft.pop(lease.id, None) is not None

    def missed(self, lease: Lease) -> None:
        """A reader came for a lease that is over."""
        self.reclaimed_in_vain += lease.state is LeaseState.RECLAIMED and not lease.missed
        lease.missed = True

    def next_end(self) -> float | None:
        """When the next lease becomes soft, or None."""
        while self._by_end:
            when, _, lease = self._by_end[0]
            if self._firm.get(lease.id) == when:
                return when
            heapq.heappop(self._by_end)
        return None

    def soften(self, now: float) -> Iterator[Lease]:
        """Those whose firm time is over by now are soft from now on."""
        while (when := self.next_end()) is not None and when <= now:
            lease = heapq.heappop(self._by_end)[2]
            del self._firm[lease.id]
            self._soft[lease.id] = lease
            heapq.heappush(self._by_age, (lease.granted, next(self._order), lease))
            if len(self._by_age) > 2 * len(self._soft) + STALE_MIN:
                kept = {entry[2].id: entry for entry in self._by_age if entry[2].id in self._soft}
                self._by_age = sorted(kept.values())
            yield lease

    def oldest(self) -> Generator[Lease]:
        """The soft ones, those granted first first, each once. It costs what is looked at; who stops before the end
        closes it.
        """
        looked_at = []
        seen: set[str] = set()
        try:
            while self._by_age:
                entry = heapq.heappop(self._by_age)
                lease = entry[2]
                if lease.id in self._soft and lease.id not in seen:
                    looked_at.append(entry)
                    seen.add(lease.id)
                    yield lease
        finally:
            for entry in looked_at:
                heapq.heappush(self._by_age, entry)

    def soonest(self, most: int) -> list[Lease]:
        """Of those that are not soft yet the ones that will be first, in that order."""
        looked_at: list[Entry] = []
        found: list[Lease] = []
        seen: set[str] = set()
        while len(found) < most and self.next_end() is not None:
            entry = heapq.heappop(self._by_end)
            looked_at.append(entry)
            lease = entry[2]
            if lease.id not in seen:
                seen.add(lease.id)
                found.append(lease)
        for entry in looked_at:
            heapq.heappush(self._by_end, entry)
        return found

    @property
    def firm_count(self) -> int:
        """How many are to become soft."""
        return len(self._firm)

    def __contains__(self, lease_id: str) -> bool:
        """Whether a lease is soft."""
        return lease_id in self._soft

    def __len__(self) -> int:
        """How many are soft."""
        return len(self._soft)
