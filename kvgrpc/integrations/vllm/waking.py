"""Waking: wakes an idle engine when its lead has news: blocks that were handed over came back.

vLLM's engine core sleeps until its input queue has something, and asks connectors nothing meanwhile. So a thread waits
at the lead's socket while the engine sleeps, and puts vLLM's own wake-up into that queue. The thread costs nothing
while there is no news, and nothing while the engine has steps to make, in which the connector hears of news by itself.
"""

import functools
import logging
import os
import select
import threading
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)

Ring = Callable[[], None]


class Bell:
    """A bell that rings once after each `arm`, when a descriptor is readable. The first `arm` starts its thread."""

    def __init__(self, news: int) -> None:
        """`news`: the descriptor."""
        self._news = news
        self._armed = os.eventfd(0, os.EFD_CLOEXEC)
        self._ring: Ring | None = None
        """The function to ring with; None: the bell has rung, or is not armed."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvgrpc-bell", daemon=True)

    def arm(self, ring: Ring) -> None:
        """Begins to wait for news. Has no effect while the bell waits already."""
        if self._ring is not None or self._closed:
            return
        if self._thread.ident is None:
            self._thread.start()
        self._ring = ring
        os.eventfd_write(self._armed, 1)

    def close(self) -> None:
        """Stops the bell. Idempotent; the descriptor must be open until this returns."""
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._armed, 1)
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._armed)

    def _run(self) -> None:
        look = select.poll()
        look.register(self._news, select.POLLIN)
        look.register(self._armed, select.POLLIN)
        while True:
            os.eventfd_read(self._armed)
            if not self._closed:
                look.poll()
            if self._closed:
                return
            ring, self._ring = self._ring, None
            if ring is not None:
                ring()


def tell_of_sleep(tell: Callable[[Ring], None]) -> None:
    """Makes the engine core of this process call `tell` when it is about to sleep, with the function that wakes it. An
    engine core that runs in its caller's loop does not sleep.
    """
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import EngineCoreProc

    notify = getattr(EngineCoreProc, "_notify_idle_state_callbacks", None)
    if notify is None:
        _log.warning("this vLLM does not say when it sleeps: idle engines hear of blocks with their next request")
        return

    @functools.wraps(notify)
    def told(core: Any) -> None:
        notify(core)
        tell(lambda: core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None)))

    EngineCoreProc._notify_idle_state_callbacks = told  # noqa: SLF001 - it is called before each sleep, and nowhere else
