"""What every RPC method shares: telemetry round it, and typed errors out of it, also for what cannot be parsed."""

import functools
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import grpc.aio
from google.protobuf.message import DecodeError, Message

from kvgrpc.errors import InternalError, InvalidRequest, KVGrpcError, OutOfRange, Reason
from kvgrpc.service import heap, status, telemetry
from kvgrpc.service.callers import PRINCIPAL, principal_of
from kvgrpc.service.lead import Lead
from kvgrpc.service.places import STANDING_BYTES, Method, Places
from kvgrpc.wire import fields, paths

_log = logging.getLogger(__name__)
WAITS = frozenset({"WaitTransfer", "WaitTransfers", "PollSchedulerNews", "PutTensor", "GetTensor"})
"""Unary methods that last as long as their caller likes: they count as streams."""
BOUNDED_BY_ITSELF = frozenset({"ConnectRank"})
"""Methods that bound what they write: commands to a rank are as long as over the session socket."""
STANDING_BYTES_MAX = STANDING_BYTES
"""Of a request that is kept as long as its call stands: it has one place."""


class Led(Protocol):
    """What a service has: the lead whose name its errors carry."""

    _lead: Lead


_Self = TypeVar("_Self", bound=Led)
_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")


class Context(Protocol):
    """What a method needs of its call."""

    def invocation_metadata(self) -> Any: ...

    def peer(self) -> str: ...


def unary(
    method: Callable[[_Self, _Request, str], Awaitable[_Reply]],
) -> Callable[[_Self, _Request, Any], Awaitable[_Reply]]:
    """A unary RPC from a method (self, request, traceparent)."""
    name = _name(method)

    @functools.wraps(method)
    async def call(self: _Self, request: _Request, context: Any) -> _Reply:
        metadata = context.invocation_metadata()
        traceparent = telemetry.traceparent_of(metadata)
        try:
            PRINCIPAL.set(principal_of(metadata, self._lead.ticket))
            check_request(request)
            if not telemetry.enabled():
                return await method(self, request, traceparent)
            with telemetry.server_span(name, traceparent) as trace:
                return await method(self, request, trace)
        except KVGrpcError as error:
            await status.abort(context, paths.placed(error, request), self._lead.header())
        except (grpc.aio.AbortError, grpc.aio.UsageError):
            raise
        except Exception as error:  # noqa: BLE001 - no request may stop the server
            _log.exception("%s failed", name)
            defect = InternalError(Reason.INTERNAL, f"a defect of kvgrpc: {error!r}")
            await status.abort(context, defect, self._lead.header())
        finally:
            # gRPC's context keeps the error that ends a call, which keeps this frame.
            del request, context

    return call


def streaming(
    method: Callable[[_Self, _Request, str], AsyncIterator[_Reply]],
) -> Callable[[_Self, _Request, Any], AsyncIterator[_Reply]]:
    """A streaming RPC from a method (self, request or requests, traceparent)."""
    name = _name(method)

    @functools.wraps(method)
    async def call(self: _Self, request: _Request, context: Any) -> AsyncIterator[_Reply]:
        metadata = context.invocation_metadata()
        traceparent = telemetry.traceparent_of(metadata)
        requests: Any = _readable(context) if isinstance(request, AsyncIterator) else request
        try:
            PRINCIPAL.set(principal_of(metadata, self._lead.ticket))
            check_request(request)
            async for reply in method(self, requests, traceparent):
                yield reply
        except KVGrpcError as error:
            await status.abort(context, paths.placed(error, request), self._lead.header())
        except (grpc.aio.AbortError, grpc.aio.UsageError):
            raise
        except Exception as error:  # noqa: BLE001 - no request may stop the server
            _log.exception("%s failed", name)
            defect = InternalError(Reason.INTERNAL, f"a defect of kvgrpc: {error!r}")
            await status.abort(context, defect, self._lead.header())
        finally:
            # gRPC's context keeps the error that ends a call, which keeps this frame.
            del request, requests, context

    return call


def _name(method: Callable[..., Any]) -> str:
    service, _, rpc = method.__qualname__.rpartition(".")
    return f"{service.removesuffix('Servicer')}/{rpc}"


@dataclass(frozen=True)
class _Unreadable:
    """What a message reads as that cannot be parsed."""

    why: str


class Registrar:
    """Registers generated services at a server, so that all calls of it have their places: `standing` those that last
    as long as their caller likes, `calls` all others; and so that no reply is longer than `message_bytes`. `ours` tell
    by themselves what cannot be parsed, which gRPC would answer with UNKNOWN.

    Methods are found by name when they are called. Those that gRPC knows before cost every call: its asyncio server
    waits for the next call of each of them by itself, and walks over all of these waits whenever one of them is over.
    """

    def __init__(
        self,
        server: grpc.aio.Server,
        lead: Lead,
        standing: Places,
        calls: Places,
        message_bytes: int,
        *,
        ours: bool = True,
    ) -> None:
        self._server, self._who, self._standing, self._calls, self._ours = server, lead.header, standing, calls, ours
        self._message_bytes = message_bytes
        self.unary: dict[str, Any] = {}
        """The handlers of all unary methods, with all that is round them, by "package.Service/Method"."""

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Generated code registers every service in two ways; the other one is enough."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        bounded = {name: self._bounded(name, handler) for name, handler in handlers.items()}
        self.unary |= {f"{service}/{name}": handler for name, handler in bounded.items() if handler.unary_unary}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, bounded),))

    def _bounded(self, name: str, handler: Any) -> Any:
        streams = handler.request_streaming or handler.response_streaming
        write = handler.response_serializer
        if name not in BOUNDED_BY_ITSELF:
            write = _writer(write, self._message_bytes)
            handler = handler._replace(response_serializer=write)
        if not streams:
            method = _writing(handler.unary_unary, write)
            if name in WAITS:
                method = self._standing.bounding(method, self._who)
            else:
                method = self._calls.bounding(method, self._who, self._standing)
            handler = handler._replace(unary_unary=method, response_serializer=bytes)
        else:
            kind = "stream_stream" if handler.request_streaming else "unary_stream"
            method = _written(getattr(handler, kind))
            method = self._standing.bounding(method if self._ours else _checked(method), self._who)
            handler = handler._replace(**{kind: method})
        # Of a stream of requests our services keep no request.
        keeps = name in WAITS or (streams and not (self._ours and handler.request_streaming))
        if not self._ours and not keeps:
            return handler
        return handler._replace(request_deserializer=_reader(handler.request_deserializer, keeps=keeps))


def _reader(parse: Callable[[bytes], object], *, keeps: bool) -> Callable[[bytes], object]:
    """Parses a request. One that is kept while its call stands is short."""

    def read(data: bytes) -> object:
        heap.read(len(data))
        if keeps and len(data) > STANDING_BYTES_MAX:
            return _Unreadable(f"it has {len(data)} bytes; the limit is {STANDING_BYTES_MAX}")
        try:
            return parse(data)
        except DecodeError as error:
            return _Unreadable(str(error))

    return read


def _writer(serialize: Callable[[Any], bytes], most: int) -> Callable[[Any], bytes]:
    """Serializes a reply. Raises OutOfRange (LIMIT_EXCEEDED) for one that its caller need not take."""

    def write(reply: Any) -> bytes:
        data = serialize(reply)
        if len(data) > most:
            what = f"the reply has {len(data)} bytes; the limit is {most}"
            raise OutOfRange(Reason.LIMIT_EXCEEDED, what, metadata={"limit": str(most)})
        return data

    return write


def _writing(method: Method, write: Callable[[Any], bytes]) -> Method:
    """A unary method whose reply is serialized within: an error of that is one of the method. One of the library's that
    refuses a call has none.
    """

    async def call(request: Any, context: Any) -> bytes | None:
        try:
            reply = await method(request, context)
            return None if reply is None else write(reply)
        finally:
            del request, context

    return call


def _written(method: Callable[[Any, Any], Any]) -> Method:
    """A streaming method, of which some are generators, as one that writes its replies by itself. Its caller has the
    initial metadata before the first reply: some libraries wait for it before they send anything.
    """
    if inspect.iscoroutinefunction(method):
        return method

    async def call(request: Any, context: Any) -> None:
        try:
            await context.send_initial_metadata(())
            async with aclosing(method(request, context)) as replies:
                async for reply in replies:
                    await context.write(reply)
                    del reply  # the next one may be long in coming
        finally:
            del request, context

    return call


def _checked(method: Method) -> Method:
    """A streaming method that does not look for what cannot be parsed."""

    async def call(request: Any, context: Any) -> object:
        try:
            if isinstance(request, AsyncIterator):
                return await method(_legible(context), context)
            _check_legible(request)
            return await method(request, context)
        finally:
            del request, context

    return call


async def _legible(context: Any) -> AsyncIterator[Any]:
    while (request := await context.read()) is not grpc.aio.EOF:
        _check_legible(request)
        yield request
        del request  # the next one may be long in coming


def _check_legible(request: object) -> None:
    """Raises InvalidRequest for a message that could not be parsed."""
    if isinstance(request, _Unreadable):
        raise InvalidRequest(Reason.INVALID_FIELD, f"the request cannot be read: {request.why}")


def check_request(request: object) -> None:
    """Raises InvalidRequest for a message that could not be parsed, and what `fields.check` raises."""
    _check_legible(request)
    if isinstance(request, Message):
        fields.check(request)


async def _readable(context: Any) -> AsyncIterator[Any]:
    """The requests of a stream. gRPC's own iterator keeps the last one, and itself, when it is left before its end."""
    while (request := await context.read()) is not grpc.aio.EOF:
        check_request(request)
        yield request
        del request  # the next one may be long in coming
