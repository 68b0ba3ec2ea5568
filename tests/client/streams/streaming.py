"""A fake server that also offers CallService. The answers that a test sets also hold for streamed calls."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc import aio

from kvgrpc.client import Client
from kvgrpc.v1.calls_pb2 import CallStatus, StreamCallsRequest, StreamCallsResponse, UnaryAnswer, UnaryCall
from tests.client.fake import METHODS, FakeServer

Rude = Callable[[StreamCallsRequest, Any], Awaitable[None]]


class StreamingServer(FakeServer):
    """A fake server with the streamed calls in `streamed`, in order, and the ids of abandoned calls in `given_up`."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = 0
        self.streamed: list[UnaryCall] = []
        self.given_up: list[int] = []
        self.rude: Rude | None = None
        """Called with each message and the stream's context, in place of an answer."""
        self._open: set[asyncio.Task[Any]] = set()

    def cut(self) -> None:
        """Ends every stream with UNAVAILABLE."""
        for task in self._open:
            task.cancel()

    def names(self) -> list[str]:
        """Returns the names of the methods that were called over a stream."""
        return [call.method.rpartition("/")[2] for call in self.streamed]

    def alone(self, method: str) -> list[Any]:
        """Returns the requests of a method that came as single calls."""
        over = [call.request for call in self.streamed if call.method.endswith(f"/{method}")]
        return [request for request in self.requests(method) if request.SerializeToString() not in over]

    def _add_more(self, server: aio.Server) -> None:
        handler: Any = grpc.stream_stream_rpc_method_handler(
            self._stream,
            request_deserializer=StreamCallsRequest.FromString,
            response_serializer=StreamCallsResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("kvgrpc.v1.CallService", {"StreamCalls": handler}),)
        )

    async def _stream(self, _: Any, context: Any) -> None:
        self.streams += 1
        reading = asyncio.ensure_future(self._read(context))
        self._open.add(reading)
        try:
            await asyncio.shield(reading)
        except asyncio.CancelledError:
            if not reading.cancelled():
                raise
            await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
        finally:
            self._open.discard(reading)
            reading.cancel()

    async def _read(self, context: Any) -> None:
        writing = asyncio.Lock()
        async with asyncio.TaskGroup() as calls:
            while (message := await context.read()) is not aio.EOF:
                self.given_up.extend(message.cancelled_call_ids)
                self.streamed.extend(message.calls)
                if self.rude is not None:
                    await self.rude(message, context)
                    continue
                if not message.calls and not message.cancelled_call_ids:
                    await context.write(StreamCallsResponse())
                for call in message.calls:
                    calls.create_task(self._serve(call, context, writing))

    async def _serve(self, call: UnaryCall, context: Any, writing: asyncio.Lock) -> None:
        name = call.method.rpartition("/")[2]
        method = METHODS[name]
        request = GetMessageClass(method.input_type).FromString(call.request)
        inside = _Context(call)
        self._note(name, request, inside)
        answer = UnaryAnswer(call_id=call.call_id)
        try:
            found: Any = GetMessageClass(method.output_type)()
            if name in self.answers:
                found = self.answers[name](request, inside)
                found = found if isinstance(found, Message) else await found
            answer.reply = found.SerializeToString()
        except _Aborted as aborted:
            answer.error.CopyFrom(aborted.status)
        async with writing:
            await context.write(StreamCallsResponse(answers=[answer]))


class _Aborted(Exception):
    def __init__(self, status: CallStatus) -> None:
        self.status = status


class _Context:
    """The part of a call's context that a fake's answers use."""

    def __init__(self, call: UnaryCall) -> None:
        self._call = call

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("traceparent", self._call.traceparent),) if self._call.traceparent else ()

    def time_remaining(self) -> float:
        return self._call.timeout.ToNanoseconds() / 1e9

    async def abort(self, code: grpc.StatusCode, message: str, trailing: Any = ()) -> NoReturn:
        for _, value in trailing:
            raise _Aborted(CallStatus.FromString(value))
        raise _Aborted(CallStatus(code=code.value[0], message=message))


async def warm(client: Client, server: StreamingServer) -> None:
    """Makes calls until one goes over the stream, then forgets the calls so far."""
    server.streamed.clear()
    while not server.streamed:
        await client.get_transfer("warm")
    server.streamed.clear()
    server.seen.clear()


async def until(condition: Callable[[], object]) -> None:
    """Waits until the condition holds."""
    while not condition():  # noqa: ASYNC110 - no event announces the condition
        await asyncio.sleep(0.01)
