"""Requests that lack blocks here, as far as somebody asks for them in their name."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvgrpc.core.values.request_times import RequestTime

KEPT = 16
"""Requests that are remembered: those that were asked for last."""
FORGOTTEN_S = 5.0
"""Nobody has asked for it for so long: it does not wait any more."""
TOLD_EVERY_S = 1.0
"""Of requests that wait for readers that wait, the log tells no more often."""


@dataclass(frozen=True)
class Lacking:
    """One request that lacks blocks."""

    by: RequestTime
    counts: Mapping[int, int]
    """Of each group."""
    since: float
    asked: float
    """When somebody asked last."""


class LackingRequests:
    """Of one life."""

    def __init__(self) -> None:
        self._rows: dict[RequestTime, Lacking] = {}
        self._told = float("-inf")

    def asked(self, by: RequestTime | None, counts: Mapping[int, int], now: float, *, enough: bool) -> None:
        """Blocks were asked for in its name, and were there or not."""
        before = self._rows.pop(by, None) if by is not None else None
        if by is None or enough:
            return
        known = before is not None and now - before.asked < FORGOTTEN_S
        self._rows[by] = Lacking(by, dict(counts), before.since if before and known else now, now)
        if len(self._rows) > KEPT:
            del self._rows[next(iter(self._rows))]

    def rows(self, now: float) -> list[Lacking]:
        """Those that wait, oldest request first."""
        waiting = [row for row in self._rows.values() if now - row.asked < FORGOTTEN_S]
        return sorted(waiting, key=lambda row: row.by)

    def tells(self, now: float) -> bool:
        """Whether it is time to tell, which is then done."""
        due = now - self._told >= TOLD_EVERY_S
        self._told = now if due else self._told
        return due
