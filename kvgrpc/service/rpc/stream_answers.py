"""Answers that go out over a stream: answers known at the same time go out in one message."""

import asyncio
import logging
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

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
        """Adds a message without answers."""
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
