"""Requests that lack blocks here, as far as callers ask for blocks in their name."""

from collections.abc import Mapping

from kvgrpc.core.values.records import dataclass
from kvgrpc.core.values.request_times import RequestTime

KEPT = 16
"""Maximum number of remembered requests. The ones asked for least recently are forgotten."""
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
    asked: float
    """Time of the last call for it."""


class LackingRequests:
    """The requests of one life that lack blocks."""

    def __init__(self) -> None:
        self._rows: dict[RequestTime, LackingRequest] = {}
        self._told = float("-inf")

    def asked(self, by: RequestTime | None, counts: Mapping[int, int], now: float, *, enough: bool) -> None:
        """Records that blocks were asked for in the name of a request, and whether there were `enough`."""
        before = self._rows.pop(by, None) if by is not None else None
        if by is None or enough:
            return
        known = before is not None and now - before.asked < FORGOTTEN_S
        self._rows[by] = LackingRequest(by, dict(counts), before.since if before and known else now, now)
        if len(self._rows) > KEPT:
            del self._rows[next(iter(self._rows))]

    def rows(self, now: float) -> list[LackingRequest]:
        """Returns the waiting requests, oldest request first."""
        waiting = [row for row in self._rows.values() if now - row.asked < FORGOTTEN_S]
        return sorted(waiting, key=lambda row: row.by)

    def tells(self, now: float) -> bool:
        """Returns whether a log entry is due. If so, the next one is due after `TOLD_EVERY_S`."""
        due = now - self._told >= TOLD_EVERY_S
        self._told = now if due else self._told
        return due
