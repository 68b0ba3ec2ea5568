"""Soft leases: live, neither firm nor claimed, so the engine may take their blocks back at any time.

A lease has one of three states here: firm with the time at which it becomes soft, soft, or unknown (claimed, ended).
Heap entries may be stale, as in `timers`. A stale entry is dropped when it reaches the top, and a heap is rebuilt when
most of its entries are stale.
"""

import heapq
from collections.abc import Generator, Iterator
from itertools import count

from kvgrpc.core.tables.leases import Lease, LeaseState
from kvgrpc.core.tables.timers import STALE_MIN

Entry = tuple[float, int, Lease]


class SoftLeases:
    """The leases of one life that nobody has claimed."""

    def __init__(self) -> None:
        self.firm_until: dict[str, float] = {}
        """Firm leases -> time at which each becomes soft. Read-only outside."""
        self._soft: dict[str, Lease] = {}
        self._by_end: list[Entry] = []
        self._by_age: list[Entry] = []
        self._order = count()
        self.reclaimed = 0
        """Number of leases taken back for their blocks."""
        self.reclaimed_in_vain = 0
        """Number of leases taken back for which a reader came later."""
        self.reclaimed_claims = 0
        """Number of leases taken back that were weakly claimed."""

    def firm(self, lease: Lease) -> bool:
        """Makes the lease firm until its `firm_until`, unless it is claimed or ends. Returns whether it was soft."""
        was_soft = self._soft.pop(lease.id, None) is not None
        self.firm_until[lease.id] = lease.firm_until
        heapq.heappush(self._by_end, (lease.firm_until, next(self._order), lease))
        if len(self._by_end) > 2 * len(self.firm_until) + STALE_MIN:
            kept = {entry[2].id: entry for entry in self._by_end if self.firm_until.get(entry[2].id) == entry[0]}
            self._by_end = sorted(kept.values())
        return was_soft

    def take_out(self, lease: Lease) -> bool:
        """Removes a claimed or ended lease. Returns whether it was soft."""
        self.firm_until.pop(lease.id, None)
        return self._soft.pop(lease.id, None) is not None

    def missed(self, lease: Lease) -> None:
        """Records that a reader came for a lease that is over."""
        self.reclaimed_in_vain += lease.state is LeaseState.RECLAIMED and not lease.missed
        lease.missed = True

    def next_end(self) -> float | None:
        """Returns the time at which the next lease becomes soft, or None."""
        while self._by_end:
            when, _, lease = self._by_end[0]
            if self.firm_until.get(lease.id) == when:
                return when
            heapq.heappop(self._by_end)
        return None

    def soften(self, now: float) -> Iterator[Lease]:
        """Makes the leases soft whose firm time is over, and yields them."""
        while (when := self.next_end()) is not None and when <= now:
            lease = heapq.heappop(self._by_end)[2]
            del self.firm_until[lease.id]
            self._soft[lease.id] = lease
            heapq.heappush(self._by_age, (lease.granted, next(self._order), lease))
            if len(self._by_age) > 2 * len(self._soft) + STALE_MIN:
                kept = {entry[2].id: entry for entry in self._by_age if entry[2].id in self._soft}
                self._by_age = sorted(kept.values())
            yield lease

    def oldest(self) -> Generator[Lease]:
        """Yields each soft lease once, in the order of their grants. The cost is that of the leases looked at. A caller
        that stops early closes the generator.
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
        """Returns the firm leases that become soft first, in that order."""
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

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._soft

    def __len__(self) -> int:
        """Returns the number of soft leases."""
        return len(self._soft)
