"""A client of CallService.StreamCalls that sends and reads what a test says."""

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2

from kvgrpc.v1 import calls_pb2
from tests.service.api import Api
from tests.service.services import SERVICES

STREAM_S = 60.0
_METHODS = {
    method.input_type.full_name: (f"{service.full_name}/{method.name}", method)
    for service in SERVICES
    for method in service.methods
}


@dataclass
class Streamed:
    """One stream. It keeps answers until a test asks for them."""

    stream: Any
    sent: "queue.Queue[calls_pb2.StreamCallsRequest | None]"
    methods: dict[int, Any] = field(default_factory=dict)
    answers: list[calls_pb2.UnaryAnswer] = field(default_factory=list)

    def send(self, *messages: Message, **fields: Any) -> list[int]:
        """Sends one message with these calls, each with these fields. Returns their ids."""
        calls = [self.call(message, **fields) for message in messages]
        self.sent.put(calls_pb2.StreamCallsRequest(calls=calls))
        return [call.call_id for call in calls]

    def call(self, message: Message, **fields: Any) -> calls_pb2.UnaryCall:
        path, method = _METHODS[message.DESCRIPTOR.full_name]
        call_id = len(self.methods) + 1
        self.methods[call_id] = method
        usual = {"call_id": call_id, "method": path, "request": message.SerializeToString()}
        return calls_pb2.UnaryCall(**{**usual, **fields})

    def cancel(self, *call_ids: int) -> None:
        self.sent.put(calls_pb2.StreamCallsRequest(cancelled_call_ids=call_ids))

    def next(self) -> calls_pb2.UnaryAnswer:
        """Returns the next answer, to any call."""
        while not self.answers:
            self.answers.extend(next(self.stream).answers)
        return self.answers.pop(0)

    def reply(self, message: Message, **fields: Any) -> Any:
        """Makes a call and returns its reply, which must be the next answer."""
        (call_id,) = self.send(message, **fields)
        answer = self.next()
        assert answer.call_id == call_id, answer
        return self.read(answer)

    def read(self, answer: calls_pb2.UnaryAnswer) -> Any:
        assert answer.WhichOneof("answer") == "reply", answer
        return GetMessageClass(self.methods[answer.call_id].output_type).FromString(answer.reply)

    def refusal(self, message: Message, **fields: Any) -> tuple[int, str]:
        """Makes a call that must be refused. Returns the refusal's code and reason."""
        self.send(message, **fields)
        return refused(self.next())

    def finish(self) -> None:
        """Sends no more calls."""
        self.sent.put(None)


def refused(answer: calls_pb2.UnaryAnswer) -> tuple[int, str]:
    """Returns the code and reason of an answer that is an error."""
    assert answer.WhichOneof("answer") == "error", answer
    return answer.error.code, info_of(answer.error.details).reason


def info_of(details: Any) -> error_details_pb2.ErrorInfo:
    info = error_details_pb2.ErrorInfo()
    row: AnyMessage = details[0]
    assert row.Unpack(info)
    return info


@contextmanager
def streaming(api: Api, **call: Any) -> Iterator[Streamed]:
    """Opens a stream for the duration of the context."""
    sent: queue.Queue[calls_pb2.StreamCallsRequest | None] = queue.Queue()
    stream = api.calls.StreamCalls(iter(sent.get, None), timeout=STREAM_S, **call)
    made = Streamed(stream, sent)
    try:
        sent.put(calls_pb2.StreamCallsRequest())
        assert not next(stream).answers
        yield made
    finally:
        made.finish()
        stream.cancel()
