"""How many handshakes callers may cause: so many in a while from one connection, and so many from all. Renewals at
another lead, for which no caller waits, count as well, in pieces of some keys.

A while is the longest that one takes, so that this bounds those under way as well. What the engine itself asks for, and
moves that go on, are not bounded by what callers do.
"""

from collections import Counter, deque

from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import Exhausted, Reason


class DialBudget:
    """Handshakes that callers caused of late."""

    def __init__(self) -> None:
        self._begun: deque[tuple[float, str]] = deque()
        """When, and for which connection; the oldest first."""
        self._counts: Counter[str] = Counter()

    def check(self, connection: str, limits: Limits, now: float) -> None:
        """Raises Exhausted (LIMIT_EXCEEDED) when this connection may cause none now."""
        self._forget(now - limits.connect_timeout_s)
        ours = self._counts[connection]  # 0 for one that has none, which is not kept
        for what, count, most in (
            ("this connection", ours, limits.dials_per_connection),
            ("callers", len(self._begun), limits.dials),
        ):
            if connection and count >= most:
                raise Exhausted(
                    Reason.LIMIT_EXCEEDED,
                    f"{what} caused {most} handshakes, or renewals at other leads, within "
                    f"{limits.connect_timeout_s:g} s: come back later, or name a peer that is connected",
                    retry_delay_s=max(0.1, self._begun[0][0] + limits.connect_timeout_s - now),
                    metadata={"limit": str(most)},
                )

    def begin(self, connection: str, now: float, count: int = 1) -> None:
        """A connection caused so many; empty: it was no caller."""
        if connection:
            self._begun.extend([(now, connection)] * count)
            self._counts[connection] += count

    def left(self) -> dict[str, int]:
        """How many rows each table still has."""
        return {"begun": len(self._begun), "counts": len(self._counts)}

    def _forget(self, past: float) -> None:
        while self._begun and self._begun[0][0] <= past:
            _, connection = self._begun.popleft()
            self._counts[connection] -= 1
            if not self._counts[connection]:
                del self._counts[connection]
