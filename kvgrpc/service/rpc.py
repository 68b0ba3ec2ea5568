"""What every RPC method shares: telemetry round it, and typed errors out of it, also for what cannot be parsed."""

import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import grpc.aio
from google.protobuf.message import DecodeError, Message

from kvgrpc.errors import InternalError, InvalidRequest, KVGrpcError, Reason
from kvgrpc.service import heap, status, telemetry
from kvgrpc.wire import fields

_log = logging.getLogger(__name__)
_Self = TypeVar("_Self")
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
        traceparent = telemetry.traceparent_of(context.invocation_metadata())
        try:
            check_request(request)
            if not telemetry.enabled():
                return await method(self, request, traceparent)
            with telemetry.server_span(name, traceparent) as trace:
                return await method(self, request, trace)
        except KVGrpcError as error:
            await status.abort(context, error)
        except (grpc.aio.AbortError, grpc.aio.UsageError):
            raise
        except Exception as error:  # noqa: BLE001 - no request may stop the server
            _log.exception("%s failed", name)
            await status.abort(context, InternalError(Reason.INTERNAL, f"a defect of kvgrpc: {error!r}"))
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
        traceparent = telemetry.traceparent_of(context.invocation_metadata())
        requests: Any = _readable(context) if isinstance(request, AsyncIterator) else request
        try:
            check_request(request)
            async for reply in method(self, requests, traceparent):
                yield reply
        except KVGrpcError as error:
            await status.abort(context, error)
        except (grpc.aio.AbortError, grpc.aio.UsageError):
            raise
        except Exception as error:  # noqa: BLE001 - no request may stop the server
            _log.exception("%s failed", name)
            await status.abort(context, InternalError(Reason.INTERNAL, f"a defect of kvgrpc: {error!r}"))
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
    """Registers generated services at a server. gRPC itself would answer what it cannot parse with UNKNOWN."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Generated code registers every service in two ways; the other one is enough."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        tolerant = {
            name: handler._replace(request_deserializer=_reader(handler.request_deserializer))
            for name, handler in handlers.items()
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, tolerant),))


def _reader(parse: Callable[[bytes], object]) -> Callable[[bytes], object]:
    def read(data: bytes) -> object:
        heap.read(len(data))
        try:
            return parse(data)
        except DecodeError as error:
            return _Unreadable(str(error))

    return read


def check_request(request: object) -> None:
    """Raises InvalidRequest for a message that could not be parsed, and what `fields.check` raises."""
    if isinstance(request, _Unreadable):
        raise InvalidRequest(Reason.INVALID_FIELD, f"the request cannot be parsed: {request.why}")
    if isinstance(request, Message):
        fields.check(request)


async def _readable(context: Any) -> AsyncIterator[Any]:
    """The requests of a stream. gRPC's own iterator keeps the last one, and itself, when it is left before its end."""
    while (request := await context.read()) is not grpc.aio.EOF:
        check_request(request)
        yield request
        del request  # the next one may be long in coming
