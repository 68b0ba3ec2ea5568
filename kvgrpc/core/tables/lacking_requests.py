"""Requests that lack blocks here, as far as callers ask for blocks in their name."""

from collections.abc import Mapping

from kvgrpc.core.tables.remembered import Remembered
from kvgrpc.core.values.records import dataclass
from kvgrpc.core.values.request_times import RequestTime

KEPT = 16
"""Maximum number of remembered requests."""
FORGOTTEN_S = 5.0
"""Time in seconds without a call for a request after which it no longer counts as waiting."""
TOLD_EVERY_S = 1.0
"""Minimum time between two log entries about requests that wait for waiting readers, in seconds."""


@dataclass(frozen=True)
class LackingRequest:
    """One request that lacks blocks."""

    by: RequestTime
    counts: Mapping[int, int]
    """Number of requested blocks of each group."""
    since: float
    until: float
    """Time until which it counts as waiting, if there is no further call for it."""


class LackingRequests:
    """The requests of one life that lack blocks."""

    def __init__(self) -> None:
        self._rows = Remembered[RequestTime, LackingRequest](KEPT, FORGOTTEN_S)
        """The latest call for a request makes its row the newest."""
        self._told = float("-inf")

    def asked(self, by: RequestTime | None, counts: Mapping[int, int], now: float, *, enough: bool) -> None:
        """Records that blocks were asked for in the name of a request, and whether there were `enough`."""
        if by is None:
            return
        self._rows.expire(now)
        before = self._rows.get(by)
        if enough:
            self._rows.drop(by)
        else:
            since = now if before is None else before.since
            self._rows.add(by, LackingRequest(by, dict(counts), since, now + FORGOTTEN_S), now)

    def rows(self, now: float) -> list[LackingRequest]:
        """Returns the waiting requests, oldest request first."""
        waiting = [row for row in self._rows.values() if now < row.until]
        return sorted(waiting, key=lambda row: row.by)

    def tells(self, now: float) -> bool:
        """Returns whether a log entry is due. If so, the next one is due after `TOLD_EVERY_S`."""
        due = now - self._told >= TOLD_EVERY_S
        self._told = now if due else self._told
        return due
