"""Standing streams: they last as long as both ends do, and are ended before the server. Otherwise gRPC would break them
off after its grace, and report a call whose peer hangs up at that moment as a defect.

Answers that are known at the same time go out over a stream in one message (`StreamAnswers`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from kvgrpc.errors import Reason, Unavailable

END_S = 1.0
"""Maximum wait for the streams to end, in seconds; far above what it takes."""

_Message = TypeVar("_Message")


class OpenStreams:
    """The streams that stand now.

    They are ended only where they wait for their peer: gRPC's Python layer forgets what it was sending when the sender
    is cancelled, and then sends the call's head twice.
    """

    def __init__(self) -> None:
        self._streams: set[asyncio.Task[object]] = set()
        self._reading: set[asyncio.Task[object]] = set()
        self._of_life: set[asyncio.Task[object]] = set()
        """Tasks of streams that end with this engine's life."""
        self._ended: set[asyncio.Task[object]] = set()
        """Tasks of streams whose life has ended, or that were replaced."""
        self._named: dict[Hashable, asyncio.Task[object]] = {}
        self._names: dict[asyncio.Task[object], Hashable] = {}
        self._over = False

    @contextmanager
    def one(self, *, of_life: bool = False) -> Iterator[None]:
        """Holds a stream that the current task serves inside. The context exits in order when all streams are ended,
        and with `of_life` also when this life of the engine ends.

        Raises Unavailable (ENGINE_LOST) after `end`.
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
        """Gives the current stream that name, and ends the stream that had it before."""
        task = _present()
        before = self._named.get(name, task)
        self._named[name], self._names[task] = task, name
        if before is not task:
            self._ended.add(before)
            if before in self._reading:
                before.cancel()

    async def read(self, next_message: Callable[[], Awaitable[_Message]]) -> _Message:
        """Returns the peer's next message. Call it inside `one`, which this leaves when the streams end."""
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
        """Ends the streams of the engine's life. New streams may begin at once."""
        self._ended |= self._of_life
        for task in self._ended & self._reading:
            task.cancel()

    async def end(self) -> None:
        """Ends all streams. No stream begins any more."""
        self._over = True
        for task in self._reading:
            task.cancel()
        if self._streams:
            await asyncio.wait(list(self._streams), timeout=END_S)


class OverError(Exception):
    """The stream is ended. Its code may still send its last messages, and then returns."""


def _present() -> asyncio.Task[object]:
    task = asyncio.current_task()
    assert task is not None
    return task


_log = logging.getLogger(__name__)

MESSAGE_BYTES = 1 << 20
"""Maximum size of answers that go out together, in bytes."""
SHARE = 4
"""Divisor of the message limit: answers together take at most 1/SHARE of it, because the last of them may be long."""
ENVELOPE_BYTES = 1_024
"""Upper bound of what a message adds to the answer in it, in bytes."""

_M = TypeVar("_M", bound=Message)


class StreamAnswers(Generic[_M]):
    """The answers of one stream of calls, in messages of one kind. A message has at most `most` bytes if no answer in
    it has more than `answer_bytes`.
    """

    def __init__(self, context: Any, kind: type[_M], most: int) -> None:
        self.bound(most)
        self._context = context
        self._kind = kind
        self._messages: list[Any] = []
        self._sending = asyncio.Lock()
        self._writers: set[asyncio.Task[None]] = set()
        self._due = False
        """A writer is scheduled and has not begun."""
        self.more = False
        """More answers follow at once, and their producer calls `write`."""

    def bound(self, most: int) -> None:
        """Makes later messages at most that long."""
        self.answer_bytes = most - ENVELOPE_BYTES
        self._together = min(MESSAGE_BYTES, most // SHARE)

    def answer(self, call_id: int, nbytes: int = 0) -> Any:
        """Adds an answer to the next message, for the caller to fill in place: a later insertion would copy it."""
        if not self._messages or self._messages[-1].ByteSize() + nbytes > self._together:
            self._messages.append(self._kind())
        return self._messages[-1].answers.add(call_id=call_id)

    def take_back(self) -> None:
        """Removes the answer that was added last."""
        del self._messages[-1].answers[-1]
        if not self._messages[-1].answers:
            self._messages.pop()

    def add_empty(self) -> None:
        self._messages.append(self._kind())

    def see_to_write(self) -> None:
        """Schedules a write, unless a write is due or running, or `more` is set."""
        if not self.more and not self._due and not self._sending.locked():
            self._due = True
            writer = asyncio.create_task(self.write())
            self._writers.add(writer)
            writer.add_done_callback(self._written)

    async def write(self) -> None:
        """Sends the answers that are known. Later answers go with the next message. The stream's reader waits for the
        write: a caller that does not take its answers must not send more calls.
        """
        self._due = False
        async with self._sending:
            while self._messages:
                await self._context.write(self._messages.pop(0))

    def close(self) -> None:
        """Cancels the writers: nothing goes out any more."""
        for writer in self._writers:
            writer.cancel()

    def _written(self, writer: asyncio.Task[None]) -> None:
        self._writers.discard(writer)
        if not writer.cancelled() and writer.exception() is not None:
            _log.debug("the caller is gone before its answers", exc_info=writer.exception())
