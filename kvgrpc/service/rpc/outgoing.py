"""Answers that go out over a stream: what is known at once goes out in one message."""

import asyncio
import logging
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

_log = logging.getLogger(__name__)

MESSAGE_BYTES = 1 << 20
"""Answers that go out together."""
SHARE = 4
"""Of what a message may have, they take at most one part in so many: the last of them may be long."""
ENVELOPE_BYTES = 1_024
"""More than a message adds to the answer in it."""

_M = TypeVar("_M", bound=Message)


class Outgoing(Generic[_M]):
    """The answers of one stream of calls, in messages of one kind, each of at most `most` bytes if no answer has more
    than `answer_bytes`.
    """

    def __init__(self, context: Any, kind: type[_M], most: int) -> None:
        self.answer_bytes = most - ENVELOPE_BYTES
        self._context = context
        self._kind = kind
        self._together = min(MESSAGE_BYTES, most // SHARE)
        self._messages: list[Any] = []
        self._sending = asyncio.Lock()
        self._writers: set[asyncio.Task[None]] = set()
        self._due = False
        """A writer has yet to begin."""
        self.more = False
        """More is known in a moment, and who makes it known writes."""

    def answer(self, call_id: int, nbytes: int = 0) -> Any:
        """An answer in the message that goes out next, to be filled in place: putting it there later would copy it."""
        if not self._messages or self._messages[-1].ByteSize() + nbytes > self._together:
            self._messages.append(self._kind())
        return self._messages[-1].answers.add(call_id=call_id)

    def add_empty(self) -> None:
        """A message without answers."""
        self._messages.append(self._kind())

    def see_to_write(self) -> None:
        """Answers go out soon."""
        if not self.more and not self._due and not self._sending.locked():
            self._due = True
            writer = asyncio.create_task(self.write())
            self._writers.add(writer)
            writer.add_done_callback(self._written)

    async def write(self) -> None:
        """Sends what is known; what comes meanwhile goes with the next message. Who reads waits until all is sent: a
        caller that does not take its answers is to send no more calls.
        """
        self._due = False
        async with self._sending:
            while self._messages:
                await self._context.write(self._messages.pop(0))

    def close(self) -> None:
        """Nothing goes out any more."""
        for writer in self._writers:
            writer.cancel()

    def _written(self, writer: asyncio.Task[None]) -> None:
        self._writers.discard(writer)
        if not writer.cancelled() and writer.exception() is not None:
            _log.debug("the caller is gone before its answers", exc_info=writer.exception())
