"""Streams of peers that stand as long as both leads do, and their end before the server's: gRPC, which would break
them off after its grace, reports a call whose peer hangs up at that moment as a defect.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from kvgrpc.errors import Reason, Unavailable

END_S = 1.0
"""Far above what it takes to end them."""

_Message = TypeVar("_Message")


class OpenStreams:
    """The streams that stand now.

    They are ended where they wait for their peer and nowhere else: gRPC's Python layer forgets what it was sending when
    the sender is cancelled, and then sends the call's head twice.
    """

    def __init__(self) -> None:
        self._streams: set[asyncio.Task[object]] = set()
        self._reading: set[asyncio.Task[object]] = set()
        self._of_life: set[asyncio.Task[object]] = set()
        """Those that end with this engine's life."""
        self._ended: set[asyncio.Task[object]] = set()
        """Those whose life has ended, or that have been replaced."""
        self._named: dict[Hashable, asyncio.Task[object]] = {}
        self._names: dict[asyncio.Task[object], Hashable] = {}
        self._over = False

    @contextmanager
    def one(self, *, of_life: bool = False) -> Iterator[None]:
        """A stream, served inside by the present task: it returns in order when all are ended, and one that is
        `of_life` when this life of the engine is.

        Raises Unavailable (ENGINE_LOST) after the end of all.
        """
        if self._over:
            raise Unavailable(Reason.ENGINE_LOST, "the server is stopping")
        task = _present()
        self._streams.add(task)
        if of_life:
            self._of_life.add(task)
        try:
            yield
        except OverError:
            pass
        finally:
            for tasks in (self._streams, self._of_life, self._ended):
                tasks.discard(task)
            name = self._names.pop(task, None)
            if name is not None and self._named[name] is task:
                del self._named[name]

    def replace(self, name: Hashable) -> None:
        """The present stream is the one of that name from now on: the one before it is ended."""
        task = _present()
        before = self._named.get(name, task)
        self._named[name], self._names[task] = task, name
        if before is not task:
            self._ended.add(before)
            if before in self._reading:
                before.cancel()

    async def read(self, next_message: Callable[[], Awaitable[_Message]]) -> _Message:
        """What the peer of a stream sends next; inside `one`, which this leaves when the streams are ended."""
        task = _present()
        if self._has_ended(task):
            raise OverError
        self._reading.add(task)
        try:
            return await next_message()
        except asyncio.CancelledError:
            if not self._has_ended(task):
                raise
            task.uncancel()
            raise OverError from None
        finally:
            self._reading.discard(task)

    def _has_ended(self, task: asyncio.Task[object]) -> bool:
        return self._over or task in self._ended

    def end_life(self) -> None:
        """Ends those that end with the engine's life; others may begin at once."""
        self._ended |= self._of_life
        for task in self._ended & self._reading:
            task.cancel()

    async def end(self) -> None:
        """Ends all; none begins any more."""
        self._over = True
        for task in self._reading:
            task.cancel()
        if self._streams:
            await asyncio.wait(list(self._streams), timeout=END_S)


class OverError(Exception):
    """The streams are ended: a stream that hears it where it reads may still say what it has to, and then returns."""


def _present() -> asyncio.Task[object]:
    task = asyncio.current_task()
    assert task is not None
    return task
