"""A server on a real socket that answers as a test says.

It offers every RPC of kvgrpc.v1 and returns an empty reply until a test puts a function into `answers`. It records each
call's request, metadata and remaining time.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from kvgrpc.v1 import (
    admin_pb2,
    fleet_pb2,
    handoff_pb2,
    handshake_pb2,
    lease_pb2,
    pool_pb2,
    scheduler_pb2,
    tensor_pb2,
    transfer_pb2,
)

FILES = (admin_pb2, fleet_pb2, handoff_pb2, handshake_pb2, lease_pb2, pool_pb2, scheduler_pb2, tensor_pb2, transfer_pb2)
METHODS: dict[str, MethodDescriptor] = {
    method.name: method
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}

Answer = Callable[[Any, Any], Message | Awaitable[Message] | AsyncIterator[Message]]


@dataclass(frozen=True)
class Seen:
    """One call that the server received."""

    method: str
    request: Any
    metadata: dict[str, str]
    time_s: float | None


class FakeServer:
    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.seen: list[Seen] = []
        self.port = 0
        self._server: aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self, credentials: grpc.ServerCredentials | None = None) -> None:
        """Starts the server, on the same port as before if it ran before."""
        self._server = aio.server(options=[("grpc.so_reuseport", 0)])
        self._add_more(self._server)
        for file in FILES:
            for service in file.DESCRIPTOR.services_by_name.values():
                handlers = {method.name: self._handler(method) for method in service.methods}
                generic = grpc.method_handlers_generic_handler(service.full_name, handlers)
                self._server.add_generic_rpc_handlers((generic,))
        if credentials:
            self.port = self._server.add_secure_port(self.address, credentials)
        else:
            self.port = self._server.add_insecure_port(self.address)
        await self._server.start()

    def _add_more(self, server: aio.Server) -> None:
        """Registers the additional services of a subclass."""

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def requests(self, method: str) -> list[Any]:
        return [seen.request for seen in self.seen if seen.method == method]

    def _handler(self, method: MethodDescriptor) -> "grpc.RpcMethodHandler[Any, Any]":
        request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)

        async def unary(asked: Message, context: Any) -> Message:
            self._note(method.name, asked, context)
            answer: Any = self.answers[method.name](asked, context) if method.name in self.answers else response()
            return answer if isinstance(answer, Message) else await answer

        async def stream(asked: Any, context: Any) -> AsyncIterator[Message]:
            self._note(method.name, asked, context)
            if method.name in self.answers:
                answers: Any = self.answers[method.name](asked, context)
                async for answer in answers:
                    yield answer

        kinds: dict[tuple[bool, bool], Any] = {
            (False, False): lambda **k: grpc.unary_unary_rpc_method_handler(unary, **k),
            (False, True): lambda **k: grpc.unary_stream_rpc_method_handler(stream, **k),
            (True, True): lambda **k: grpc.stream_stream_rpc_method_handler(stream, **k),
        }
        make = kinds[method.client_streaming, method.server_streaming]
        handler: grpc.RpcMethodHandler[Any, Any] = make(
            request_deserializer=request.FromString, response_serializer=response.SerializeToString
        )
        return handler

    def _note(self, method: str, request: Any, context: Any) -> None:
        metadata = {str(key): str(value) for key, value in context.invocation_metadata() or ()}
        self.seen.append(Seen(method, request, metadata, context.time_remaining()))


def failing(code: grpc.StatusCode, reason: str = "", **how: Any) -> Answer:
    """Returns an answer that fails with this status."""

    async def answer(request: Any, context: Any) -> Message:
        await fail(context, code, reason, **how)

    return answer


async def fail(
    context: Any,
    code: grpc.StatusCode,
    reason: str = "",
    message: str = "as the test says",
    *,
    details: tuple[Message, ...] = (),
    metadata: Mapping[str, str] | None = None,
) -> NoReturn:
    """Ends a call like a kvgrpc server, or without a reason with a plain gRPC status."""
    trailing: tuple[tuple[str, bytes], ...] = ()
    if reason:
        info = error_details_pb2.ErrorInfo(reason=reason, domain="kvgrpc.dev", metadata=metadata)
        trailing = (("grpc-status-details-bin", encoded(code, message, info, *details)),)
    await context.abort(code, message, trailing)
    raise AssertionError("abort does not return")


def encoded(code: grpc.StatusCode, message: str, *details: Message) -> bytes:
    """Returns a google.rpc.Status, built with the published google.rpc classes."""
    rows = []
    for detail in details:
        row = AnyMessage()
        row.Pack(detail)
        rows.append(row)
    status: Message = status_pb2.Status(code=code.value[0], message=message, details=rows)
    return status.SerializeToString()


def retry_info(seconds: float) -> error_details_pb2.RetryInfo:
    delay = Duration()
    delay.FromNanoseconds(round(seconds * 1e9))
    return error_details_pb2.RetryInfo(retry_delay=delay)
