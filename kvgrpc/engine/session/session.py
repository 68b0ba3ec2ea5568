"""One session of an engine with its lead: calls out, answers and events in. A session ends with its lead.

Calls of a scheduler go out as one frame for each step, however many they are.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvgrpc.core.values import grants
from kvgrpc.core.values.ids import mint_lease_id
from kvgrpc.engine.session.connection import LeadConnection, LeadDied, SessionOver
from kvgrpc.engine.transfers.events import Event
from kvgrpc.engine.transfers.handles import Handle, Pull
from kvgrpc.engine.transfers.table import Transfers
from kvgrpc.engine.transfers.void_slots import VoidSlots
from kvgrpc.errors import DeadlineExceeded, KVGrpcError, OutOfRange, Reason
from kvgrpc.session.v1 import session_pb2
from kvgrpc.v1 import pool_pb2
from kvgrpc.wire.frames import encode, encode_rows
from kvgrpc.wire.values import error_row, stated_error


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


_log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
UNSAID_MAX = 64
"""Maximum number of events that are read but not acknowledged while nothing else is sent: an acknowledgement alone
would wake the lead.
"""


class Session:
    """Everything that ends with a lead. Events for the engine join `events`."""

    def __init__(
        self, connection: LeadConnection, attached: session_pb2.AttachResponse, page: VoidSlots, events: list[Event]
    ) -> None:
        self.connection = connection
        self._incarnation = attached.header.incarnation
        self._secret = attached.session_secret
        self.grant_key = grants.signing_key(self._secret)
        self._leases = 0
        self._outbox = Outbox()
        self._transfers = Transfers(page)
        self._events = events
        self._answers: dict[int, session_pb2.CallAnswer | None] = {}
        """Answers by call, for callers that want them; None: not answered yet."""
        self._abandoned: set[int] = set()
        """Calls whose callers no longer wait for the answer."""
        self._unsent: list[Pull] = []
        self.pushes_wanted: list[bytes] = []
        """Keys of PushWanted that are not taken yet."""
        # Numbers of the last event that was read, that the engine was told, and that was acknowledged to the lead.
        self._read_event = self._told_event = self._acknowledged_event = 0

    def ask(self, handle: Handle | None, traceparent: str = "", **request: Any) -> session_pb2.Call:
        """Queues a call. Its answer and its events go to `handle`."""
        call = self._outbox.add(traceparent, **request)
        if handle is not None:
            self._transfers.asked(call.call_id, handle)
        return call

    def ask_for(self, pull: Pull, traceparent: str, **request: Any) -> None:
        """Queues the call of a pull, which can be changed until it is sent."""
        pull.unsent = self.ask(pull, traceparent, **request).pull_blocks
        self._unsent.append(pull)

    def say(self, **request: Any) -> None:
        """Queues a call that is answered only when it fails."""
        self._outbox.add_silent(**request)

    def mint(self) -> str:
        """Returns a new lease id."""
        self._leases += 1
        return mint_lease_id(self._secret, self._incarnation, "engine", self._leases)

    def wait(self, timeout_s: float | None = None, **request: Any) -> session_pb2.CallAnswer:
        """Makes one call and returns its answer; events that come meanwhile are kept. With `timeout_s` it waits no
        longer than that, and does not ask a lead that owes an earlier answer. Raises the refusal of the call,
        DeadlineExceeded, LeadDied.
        """
        if timeout_s is not None and self._abandoned:
            self.read(0.0)
            if self._abandoned:
                raise _unanswered("an earlier call in time")
        timeout_s = CALL_TIMEOUT_S if timeout_s is None else timeout_s
        call_id = self.ask(None, **request).call_id
        self._answers[call_id] = None
        self.flush()
        deadline = time.monotonic() + timeout_s
        try:
            while (answer := self._answers[call_id]) is None:
                if not self.read(deadline - time.monotonic()):
                    self._abandoned.add(call_id)
                    raise _unanswered(f"within {timeout_s:g} s")
        finally:
            del self._answers[call_id]
        return _unrefused(answer)

    def begin(self, traceparent: str = "", **request: Any) -> int:
        """Queues a call for `answer`, and returns its number."""
        call_id = self.ask(None, traceparent, **request).call_id
        self._answers[call_id] = None
        return call_id

    def answered(self, call_id: int) -> bool:
        return self._answers[call_id] is not None

    def answer(self, call_id: int) -> session_pb2.CallAnswer:
        """Returns the answer to a call that has one, once. Raises the error that refused the call."""
        answer = self._answers.pop(call_id)
        assert answer is not None, "it was answered"
        return _unrefused(answer)

    def flush(self) -> None:
        """Sends queued calls, and acknowledges events that the engine was told. Raises LeadDied."""
        if not self._outbox and self._told_event - self._acknowledged_event < UNSAID_MAX:
            return
        for pull in self._unsent:
            pull.unsent = None
        self._unsent.clear()
        refused: list[session_pb2.Event] = []
        for frame in self._outbox.take(self._told_event, lambda call, error: refused.append(_refusal(call, error))):
            self.connection.send(frame)
        self._acknowledged_event = self._told_event
        for event in refused:
            self._take_event(event)

    def read(self, timeout_s: float) -> bool:
        """Takes the frames that are there and sends calls that waited. Returns False if none came. Raises LeadDied."""
        frames = self.connection.receive(timeout_s)
        self._take(frames)
        self.flush()
        return bool(frames)

    def told(self) -> None:
        """Notes that the engine was told every event that was read."""
        self._told_event = self._read_event

    def lose(self, message: str) -> list[Handle]:
        """Ends the session of a dead lead: takes its last frames, and fails everything else. Returns the transfers that
        are not over. Raises SessionOver if the lead last said that the engine's life is over.
        """
        try:
            while frames := self.connection.receive(0.0):
                self._take(frames)
        except SessionOver:
            raise
        except LeadDied:
            pass  # expected: the lead is gone
        self.connection.close()
        for pull in self._unsent:
            pull.unsent = None
        handles, events = self._transfers.lose(message)
        self._events += events
        return handles

    def _take(self, frames: Sequence[session_pb2.ServerFrame]) -> None:
        for frame in frames:
            for event in frame.events.events:
                self._read_event = event.event_id
                self._take_event(event)
            if frame.HasField("over"):
                raise SessionOver(Reason.PEER_LOST, f"the session is over: {frame.over.message}")

    def _take_event(self, event: session_pb2.Event) -> None:
        if event.HasField("push_wanted"):
            self.pushes_wanted.append(event.push_wanted.transfer_key)
            return
        if event.HasField("answer"):
            self._take_answer(event.answer)
        self._events += self._transfers.take(event)

    def _take_answer(self, answer: session_pb2.CallAnswer) -> None:
        if answer.call_id in self._answers:
            self._answers[answer.call_id] = answer
        elif answer.call_id in self._abandoned:
            self._abandoned.discard(answer.call_id)
            if answer.HasField("allocate_blocks"):
                given = pool_pb2.FreeBlocksRequest(blocks=answer.allocate_blocks.blocks)
                self.ask(None, free_blocks=given)
        elif not answer.call_id:
            _log.error("the lead refused what is answered only then: %s", answer.failure.message)


def _unrefused(answer: session_pb2.CallAnswer) -> session_pb2.CallAnswer:
    if answer.HasField("failure"):
        raise stated_error(answer.code, answer.failure.reason, answer.failure.message)
    return answer


def _unanswered(what: str) -> DeadlineExceeded:
    return DeadlineExceeded(Reason.DEADLINE, f"the lead did not answer {what}", metadata={"phase": "session"})


def _refusal(call: session_pb2.Call, error: KVGrpcError) -> session_pb2.Event:
    """Returns the event by which the lead would refuse a call that was never sent."""
    answer = session_pb2.CallAnswer(call_id=call.call_id, code=error.code, failure=error_row(error))
    return session_pb2.Event(answer=answer)
