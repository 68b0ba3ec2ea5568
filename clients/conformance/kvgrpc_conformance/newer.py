"""Plays a server of a newer version: it answers what a case states, with fields and values that no client knows.

It also shows a case what a client really sent, because it keeps every call with its request and its metadata.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from . import schema
from .proxy import Proxy
from .values import Json

DETAILS_KEY = "grpc-status-details-bin"
DOMAIN = "kvgrpc.dev"


class NewerServer:
    """Answers each method with its rows in turn, and repeats the last one."""

    def __init__(self, name: str, answers: Mapping[str, Json]) -> None:
        self.name = name
        self.clients = Proxy()
        self.seen: list[dict[str, Json]] = []
        self._answers = {schema.full_name(method): rows for method, rows in answers.items()}
        self._server: aio.Server | None = None

    @property
    def address(self) -> str:
        """Address of the server for clients."""
        return self.clients.address

    @property
    def peer_address(self) -> str:
        """Address of the server for other servers."""
        return self.clients.address

    async def start(self) -> None:
        """Serves at a free port."""
        self._server = aio.server()
        self._server.add_generic_rpc_handlers((_Handlers(self),))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        await self.clients.start()
        self.clients.target = port

    async def close(self) -> None:
        """Ends the server and the calls that are under way."""
        await self.clients.close()
        if self._server is not None:
            await self._server.stop(0)

    def answers_at_all(self, method: str) -> bool:
        """Returns whether the method is implemented."""
        return method in self._answers

    def answers(self, method: str) -> list[Json]:
        """Returns the rows of the method's next call."""
        rows = self._answers[method]
        row = rows[min(sum(call["method"] == method for call in self.seen), len(rows) - 1)]
        return row if isinstance(row, list) else [row]

    def keep(self, method: str, request: bytes, metadata: Any) -> None:
        """Records a call."""
        made = schema.request(method, {})
        made.MergeFromString(request)
        texts = {key: value for key, value in metadata or () if isinstance(value, str)}
        body = json_format.MessageToDict(made)
        self.seen.append({"method": method, "request": body, "metadata": texts})


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, server: NewerServer) -> None:
        self._server = server

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any] | None":
        method = str(handler_call_details.method).lstrip("/")
        descriptor = schema.methods().get(method)
        if descriptor is None or not self._server.answers_at_all(method):
            return None
        call = _Call(self._server, method, handler_call_details.invocation_metadata)
        if descriptor.client_streaming:
            return grpc.stream_stream_rpc_method_handler(call.conversation)
        if descriptor.server_streaming:
            return grpc.unary_stream_rpc_method_handler(call.stream)
        return grpc.unary_unary_rpc_method_handler(call.unary)


@dataclass(frozen=True)
class _Call:
    """One call of a method. Requests and answers are bytes."""

    server: NewerServer
    method: str
    metadata: Any

    async def unary(self, request: bytes, context: "aio.ServicerContext[Any, Any]") -> bytes:
        async for answer in self._answers(request, context):
            return answer
        return b""

    async def stream(self, request: bytes, context: "aio.ServicerContext[Any, Any]") -> AsyncIterator[bytes]:
        await context.send_initial_metadata(())
        async for answer in self._answers(request, context):
            yield answer

    async def _answers(self, request: bytes, context: "aio.ServicerContext[Any, Any]") -> AsyncIterator[bytes]:
        rows = self.server.answers(self.method)
        self.server.keep(self.method, request, self.metadata)
        async for answer in _played(self.method, rows, context):
            yield answer

    async def conversation(
        self, requests: AsyncIterator[bytes], context: "aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[bytes]:
        await context.send_initial_metadata(())
        async for request in requests:
            async for answer in self._answers(request, context):
                yield answer


async def _played(method: str, rows: list[Json], context: "aio.ServicerContext[Any, Any]") -> AsyncIterator[bytes]:
    """Yields the messages of one call. Each row is a message, a pause, or the error that ends the call."""
    for row in rows:
        await asyncio.sleep(row.get("delayS", 0.0))
        if "error" in row:
            await _abort(row["error"], context)
        if "reply" in row or "hex" in row:
            # The appended bytes merge into the message, as the fields of a newer schema do.
            yield schema.reply(method, row.get("reply", {})).SerializeToString() + bytes.fromhex(row.get("hex", ""))


async def _abort(error: Json, context: "aio.ServicerContext[Any, Any]") -> None:
    code = grpc.StatusCode[error["code"]]
    message = error.get("message", "")
    status = status_pb2.Status(code=code.value[0], message=message)
    if "reason" in error:
        info = error_details_pb2.ErrorInfo(
            reason=error["reason"], domain=error.get("domain", DOMAIN), metadata=error.get("metadata", {})
        )
        status.details.add().Pack(info)
    if "violations" in error:
        status.details.add().Pack(
            json_format.ParseDict({"fieldViolations": error["violations"]}, error_details_pb2.BadRequest())
        )
    if "retryDelayS" in error:
        delay = Duration(nanos=0)
        delay.FromNanoseconds(round(error["retryDelayS"] * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    trailing = ((DETAILS_KEY, status.SerializeToString()),) if status.details else ()
    await context.abort(code, message, trailing)
