"""Makes the executor's calls and streams over the client's channel, by the names of their methods."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc import aio

from kvgrpc.client import Client
from kvgrpc.client.caller import Caller

STREAM_S = 120.0


class Calls:
    """Calls through a client's channel, with its deadlines, its idempotency keys and its typed errors."""

    def __init__(self, client: Client, metadata: Mapping[str, str]) -> None:
        self._channel = client.channel
        usual: Caller = client._call  # noqa: SLF001 - a call by its name is nothing that users of the client make
        self.caller = replace(usual, metadata=(*usual.metadata, *metadata.items()), stream=None)

    async def unary(self, method: MethodDescriptor, request: Any, timeout_s: float | None) -> Message:
        """Makes one unary call."""
        stub = self._channel.unary_unary(_path(method), _written, GetMessageClass(method.output_type).FromString)
        options = {} if timeout_s is None else {"timeout_s": timeout_s}
        if "idempotency_key" not in method.input_type.fields_by_name:
            return await self.caller.read(stub, request, options)
        if request.idempotency_key:
            options["idempotency_key"] = request.idempotency_key
        return await self.caller.change(stub, request, options)

    def stream(self, method: MethodDescriptor, request: Any) -> "Streamed":
        """Opens a stream."""
        read = GetMessageClass(method.output_type).FromString
        if method.client_streaming:
            call = self._channel.stream_stream(_path(method), _written, read)
            return Streamed(method, self.caller, call(timeout=STREAM_S, metadata=self.caller.headers()), None)
        one = self._channel.unary_stream(_path(method), _written, read)
        return Streamed(method, self.caller, one(request, timeout=STREAM_S, metadata=self.caller.headers()), request)


class Streamed:
    """A stream of a generated method."""

    def __init__(self, method: MethodDescriptor, caller: Caller, call: Any, request: Any) -> None:
        self.method, self.call = method, call
        self._caller = caller
        self._request = GetMessageClass(method.input_type)() if request is None else request

    async def metadata(self) -> dict[str, str]:
        """Returns the server's initial metadata."""
        try:
            found = await self.call.initial_metadata()
        except aio.AioRpcError as failed:
            raise self._caller.error(failed, self._request) from failed
        return {key: value for key, value in found or () if isinstance(value, str)}

    async def read(self) -> Message | None:
        """Returns the next message; None at the end."""
        try:
            message = await self.call.read()
            if message is not aio.EOF:
                return message  # type: ignore[no-any-return]
            code = await self.call.code()
            if code.value[0]:
                details, trailing = await self.call.details(), await self.call.trailing_metadata()
                raise aio.AioRpcError(code, aio.Metadata(), trailing, details=details)
        except aio.AioRpcError as failed:
            raise self._caller.error(failed, self._request) from failed
        return None

    async def close(self) -> None:
        self.call.cancel()


class Queued:
    """A stream that the client itself makes: an iterator."""

    def __init__(self, events: AsyncIterator[Message], close: Callable[[], Awaitable[None]]) -> None:
        self._events, self._close = events, close

    async def metadata(self) -> dict[str, str]:
        return {}

    async def read(self) -> Message | None:
        return await anext(self._events, None)

    async def close(self) -> None:
        await self._close()


class Opened:
    """A stream with a name. A read that timed out continues, so that no message is lost."""

    def __init__(self, server: str, stream: Streamed | Queued) -> None:
        self.server = server
        self._stream = stream
        self._reading: asyncio.Task[Message | None] | None = None

    async def metadata(self) -> dict[str, str]:
        """Returns the server's initial metadata."""
        return await self._stream.metadata()

    async def send(self, made: Callable[[MethodDescriptor], Message]) -> None:
        """Sends one more message of the client."""
        assert isinstance(self._stream, Streamed)
        await self._stream.call.write(made(self._stream.method))

    async def finish(self) -> None:
        """Ends the client's messages."""
        assert isinstance(self._stream, Streamed)
        await self._stream.call.done_writing()

    async def next(self, timeout_s: float) -> Message | None:
        """Returns the next message; None at the end. Raises TimeoutError."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        message = await asyncio.wait_for(asyncio.shield(self._reading), timeout_s)
        self._reading = None
        return message

    async def close(self) -> None:
        """Ends the stream."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            self._reading = None
        await self._stream.close()

    async def _read(self) -> Message | None:
        return await self._stream.read()


def _path(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def _written(message: Message) -> bytes:
    return message.SerializeToString()
