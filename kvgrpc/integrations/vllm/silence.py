"""Silence: warns that nothing moves, although requests ask for it.

To clients an engine that computes everything by itself looks like one that is served, only slower. So one line of the
log tells operators of an error in their setup, for example a router that drops answers.
"""

import logging
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)

SILENT_S = 60.0
"""Time in which nothing moves before the warning, in seconds."""


class Silence:
    """The silence of one engine."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since: float | None = None
        """Time of the first request in vain after the last move; None: there was none."""
        self._requests = 0
        """Number of requests in vain since then."""
        self._said = False

    def moved(self) -> None:
        """Notes that KV came, or was taken."""
        self._since, self._requests, self._said = None, 0, False

    def in_vain(self, why: str) -> None:
        """Notes that a request asked for KV to move, and none did."""
        now = self._now()
        self._since = now if self._since is None else self._since
        self._requests += 1
        if not self._said and now - self._since >= SILENT_S:
            self._said = True
            what = "kvgrpc has moved nothing for %.0f s, in which %d requests asked for it; of the last one: %s"
            _log.warning(what, now - self._since, self._requests, why)
