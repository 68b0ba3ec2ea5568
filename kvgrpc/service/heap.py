"""The heap of a server process: memory of a long message goes back to the system after the message, and the garbage
collector runs seldom.

Parsing a message of 4 MB may take 300 MB. The allocator keeps that memory for later use while any later allocation lies
behind it.
"""

import asyncio
import ctypes
import gc
from typing import Any

LONG_BYTES = 1 << 20
"""Minimum size of a message that counts as long, in bytes. Usual messages are far shorter and cost nothing here."""
DELAY_S = 1.0
"""Delay until memory is given back, in seconds: most messages are answered by then, and one call serves many."""

_trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""glibc's malloc_trim; None under other C libraries."""


class _Pending:
    """State of the trimming: its timer, and the time of the last long message."""

    timer: asyncio.TimerHandle | None = None
    read: float = 0.0
    """Time of the last long message, in seconds on the loop's clock."""


def read_long() -> None:
    """Notes a long message that was read on the running loop."""
    if _trim is None:
        return
    loop = asyncio.get_running_loop()
    _Pending.read = loop.time()
    if _Pending.timer is None or _Pending.timer.when() <= loop.time():
        _Pending.timer = loop.call_later(DELAY_S, _give_back, loop)


def _give_back(loop: asyncio.AbstractEventLoop) -> None:
    # In a thread: trimming a large heap would hold up the loop.
    loop.run_in_executor(None, _trim, 0)
    if loop.time() < _Pending.read + DELAY_S:  # other long messages came and may not be over
        _Pending.timer = loop.call_later(DELAY_S, _give_back, loop)


def calm_collector() -> None:
    """Makes the garbage collector run seldom, in a process that is only a server, once it serves.

    Hardly anything here is garbage that only the collector finds, and objects of the start stay: a pull takes a
    fifteenth less time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
