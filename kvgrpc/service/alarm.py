"""One timer for many deadlines, of which most are taken back before they are due."""

import asyncio
from collections.abc import Callable
from contextvars import Context


class Alarm:
    """Rings at the earliest time for which it was set, on the running loop. That may be early, since to follow every
    deadline would cost every event: who hears it looks at what is due, and sets it again. It rings for all callers, and
    in the name of none of them.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self, when: float | None) -> None:
        """At that time of the loop's clock, at the latest; None: there is no deadline."""
        if when is None:
            return
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self._rings, context=Context())

    def clear(self) -> None:
        """It does not ring until it is set again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _rings(self) -> None:
        self._timer = None
        self._ring()
