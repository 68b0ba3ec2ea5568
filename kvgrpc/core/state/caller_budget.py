"""Budgets for the work that callers cause at other engines, per connection and for all connections together.

The window is the connect timeout. A handshake ends within it unless ranks have to meet, so a budget nearly always
bounds the handshakes under way too. The engine's own requests and running moves are not bounded by these budgets.
"""

from collections import Counter, deque

from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import full

KEYS_A_RENEWAL = 64
"""Number of keys, renewed at another lead, that count as one renewal."""


class CallerBudget:
    """Budget for one kind of work that callers cause: handshakes, or renewals at other leads."""

    def __init__(self, noun: str) -> None:
        self._noun = noun
        """Plural noun for the work, for error messages."""
        self._begun: deque[tuple[float, str]] = deque()
        """Begin time and connection of each unit of work, oldest first."""
        self._counts: Counter[str] = Counter()

    def check(self, connection: str, limits: Limits, now: float) -> None:
        """Raises Exhausted (LIMIT_EXCEEDED) when this connection may cause none now."""
        self._forget(now - limits.connect_timeout_s)
        ours = self._counts[connection]  # reading 0 for a new connection adds no row
        for what, count, most in (
            ("this connection", ours, limits.dials_per_connection),
            ("callers", len(self._begun), limits.dials),
        ):
            if connection and count >= most:
                text = f"{what} caused {most} {self._noun} within {limits.connect_timeout_s:g} s: come back later"
                raise full(text, most, max(0.1, self._begun[0][0] + limits.connect_timeout_s - now))

    def begin(self, connection: str, now: float, count: int = 1) -> None:
        """Records `count` units of work for a connection. An empty connection is no caller and is not recorded."""
        if connection:
            self._begun.extend([(now, connection)] * count)
            self._counts[connection] += count

    def left(self) -> dict[str, int]:
        """Returns the number of rows in each table."""
        return {"begun": len(self._begun), "counts": len(self._counts)}

    def _forget(self, past: float) -> None:
        while self._begun and self._begun[0][0] <= past:
            _, connection = self._begun.popleft()
            self._counts[connection] -= 1
            if not self._counts[connection]:
                del self._counts[connection]
