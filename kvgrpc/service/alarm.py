"""One timer for many deadlines, most of which are cancelled before they are due."""

import asyncio
from collections.abc import Callable
from contextvars import Context


class Alarm:
    """Rings on the running loop, at or before the earliest time that was set. It may ring early: following every
    deadline would cost every event. The listener checks what is due and sets the alarm again. It rings outside any
    caller's context, because its deadlines belong to many callers.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self, when: float | None) -> None:
        """Makes the alarm ring at the latest at `when` on the loop's clock; None: there is no deadline."""
        if when is None:
            return
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self._rings, context=Context())

    def clear(self) -> None:
        """Cancels the alarm until it is set again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _rings(self) -> None:
        self._timer = None
        self._ring()
