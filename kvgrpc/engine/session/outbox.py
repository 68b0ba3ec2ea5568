"""The queue of a scheduler's calls: one frame for each step, however many calls there are."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvgrpc.errors import OutOfRange
from kvgrpc.session.v1 import session_pb2
from kvgrpc.wire.frames import encode, encode_rows


class Outbox:
    """Numbers calls and batches them, in order."""

    def __init__(self) -> None:
        # Calls are made inside the frame that will be sent, which saves copies of long prompts.
        self._frame = session_pb2.ClientFrame()
        self._last_call = 0

    def add(self, traceparent: str = "", **request: Any) -> session_pb2.Call:
        """Queues a call, whose request may be changed until it is sent. The answer has the same `call_id`."""
        self._last_call += 1
        return self._frame.calls.calls.add(call_id=self._last_call, traceparent=traceparent, **request)

    def add_silent(self, **request: Any) -> None:
        """Queues a call that is answered only when it fails."""
        self._frame.calls.calls.add(**request)

    def __len__(self) -> int:
        return len(self._frame.calls.calls)

    def take(self, read_events: int, too_long: Callable[[session_pb2.Call, OutOfRange], None]) -> Iterator[bytes]:
        """Yields frames with the calls queued so far, and empties the queue; `too_long` gets each call that fits into
        no frame.

        `read_events`: number of the last event that was read.
        """
        frame, self._frame = self._frame, session_pb2.ClientFrame()
        frame.calls.read_events = read_events

        def part(rows: Sequence[session_pb2.Call]) -> session_pb2.ClientFrame:
            return session_pb2.ClientFrame(calls=session_pb2.CallBatch(calls=rows, read_events=read_events))

        try:
            yield encode(frame)
        except OutOfRange:
            yield from encode_rows(frame.calls.calls, part, too_long)
