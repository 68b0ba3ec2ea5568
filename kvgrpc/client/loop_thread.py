"""The event loop of all synchronous clients of a process, in a thread of its own."""

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

LEFT_BEHIND = (
    "gRPC does not work in a process that was forked from one with open clients: fork before the first one is opened, "
    "or start the process anew (multiprocessing's 'spawn' or 'forkserver')"
)


class LoopThread:
    """The event loop of all synchronous clients. It lives from the start of the first to the end of the last."""

    _lock = threading.Lock()
    _shared: "LoopThread | None" = None
    _left_behind = False
    """True if this process was forked from one that had such a thread."""

    def __init__(self) -> None:
        self.users = 0
        self._loop: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        self._end = asyncio.Event()
        self._ending: set[asyncio.Task[Any]] = set()
        # A daemon, so that a client that was not closed does not keep a program from ending.
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="kvgrpc client", daemon=True)
        self._thread.start()

    @classmethod
    def enter(cls) -> "LoopThread":
        with cls._lock:
            if cls._left_behind:
                raise RuntimeError(LEFT_BEHIND)
            cls._shared = cls._shared or cls()
            cls._shared.users += 1
            return cls._shared

    @classmethod
    def forked(cls) -> None:
        """Resets the state in a forked child, where the threads of this class and of gRPC are gone. gRPC then hangs or
        crashes.
        """
        cls._lock = threading.Lock()
        if cls._shared is not None:
            cls._shared.users, cls._shared, cls._left_behind = 0, None, True

    def leave(self) -> None:
        with self._lock:
            self.users -= 1
            if self.users:
                return
            LoopThread._shared = None
        self._loop.result().call_soon_threadsafe(self._end.set)
        self._thread.join()

    def end(self, coroutine: Coroutine[Any, Any, T]) -> T | None:
        """Runs a coroutine that ends an iterator or a context, like `run`. The garbage collector may end one in the
        loop's own thread, which must not wait for itself: there it returns None at once.
        """
        if threading.current_thread() is not self._thread:
            return self.run(coroutine)
        task = self._loop.result().create_task(coroutine)
        self._ending.add(task)
        task.add_done_callback(self._ended)
        return None

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._ending.discard(task)
        if not task.cancelled():
            task.exception()  # no caller is left to be told

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Returns the result of a coroutine, which has a deadline of its own. An interrupt of the caller cancels it."""
        if not self.alive:
            coroutine.close()
            raise RuntimeError(LEFT_BEHIND if self._left_behind else "this client is closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop.result())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def alive(self) -> bool:
        return self.users > 0

    async def _main(self) -> None:
        self._loop.set_result(asyncio.get_running_loop())
        await self._end.wait()


os.register_at_fork(after_in_child=LoopThread.forked)
