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
from collections.abc import Callable, Set
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvgrpc.engine import Engine

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


class HeldBlocks:
    """Blocks of requests that left, until their hand-overs are done with.

    They are held by a reference of our own, like those of a shared prefix, not by vLLM's delayed free: with that an
    engine makes 750 empty steps a second while a block may be read.
    """

    def __init__(self, engine: "Engine", manager: Any) -> None:
        """`manager`: the KVCacheManager of vLLM."""
        self._engine, self._manager = engine, manager
        self._blocks: dict[str, list[int]] = {}
        self._bell = Bell(engine.fileno())

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def hold(self, request_id: str, blocks: list[int]) -> None:
        """Keeps a request's blocks until `release`."""
        self.keep(blocks)
        self._blocks[request_id] = blocks

    def keep(self, blocks: list[int]) -> None:
        """Keeps blocks out of use, with one reference for each time that a block is listed."""
        pool = self._manager.block_pool
        pool.touch([pool.blocks[block] for block in blocks])

    def release(self, request_ids: Set[str], *, over: bool) -> None:
        """Drops a reference of each block of these requests. The prompt's end is evicted first, as when vLLM frees. If
        kvgrpc is `over`, releases all blocks once the lead is gone: a lead that lives may vouch for other blocks.
        """
        pool = self._manager.block_pool
        gone = over and bool(self._blocks) and self._engine.lead_gone
        for request_id in self._blocks.keys() & (self._blocks.keys() if gone else request_ids):
            pool.free_blocks([pool.blocks[block] for block in reversed(self._blocks.pop(request_id))])

    def sleeps(self, ring: Ring) -> None:
        """Prepares to wake an engine that has nothing to do: blocks that it holds may come back meanwhile."""
        if self._blocks:
            self._bell.arm(ring)

    def close(self) -> None:
        """Wakes the engine no more. Idempotent."""
        self._bell.close()


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
