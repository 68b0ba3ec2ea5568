"""Budgets of what callers may cause at other engines: so much in a while from one connection, and so much from all.

A while is the connect timeout, the longest that one handshake takes, so that a budget bounds what is under way as well.
What the engine itself asks for, and moves that go on, are not bounded by what callers do.
"""

from collections import Counter, deque

from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import Exhausted, Reason

KEYS_A_RENEWAL = 64
"""Number of keys, renewed at another lead, that count as one renewal."""


class CallerBudget:
    """Budget for one kind of work that callers cause: handshakes, or renewals at other leads."""

    def __init__(self, noun: str) -> None:
        self._noun = noun
        """What a caller caused too many of, in its error."""
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
                    f"{what} caused {most} {self._noun} within {limits.connect_timeout_s:g} s: come back later",
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
