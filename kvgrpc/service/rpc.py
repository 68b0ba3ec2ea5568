"""What every RPC method shares: telemetry round it, and typed errors out of it."""

import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol, TypeVar

import grpc.aio

from kvgrpc.errors import InternalError, KVGrpcError, Reason
from kvgrpc.service import status, telemetry

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
            with telemetry.server_span(name, traceparent) as trace:
                return await method(self, request, trace)
        except KVGrpcError as error:
            await status.abort(context, error)
        except (grpc.aio.AbortError, grpc.aio.UsageError):
            raise
        except Exception as error:  # noqa: BLE001 - no request may stop the server
            _log.exception("%s failed", name)
            await status.abort(context, InternalError(Reason.INTERNAL, f"a defect of kvgrpc: {error!r}"))

    return call


def streaming(
    method: Callable[[_Self, _Request, str], AsyncIterator[_Reply]],
) -> Callable[[_Self, _Request, Any], AsyncIterator[_Reply]]:
    """A streaming RPC from a method (self, request or requests, traceparent)."""
    name = _name(method)

    @functools.wraps(method)
    async def call(self: _Self, request: _Request, context: Any) -> AsyncIterator[_Reply]:
        traceparent = telemetry.traceparent_of(context.invocation_metadata())
        try:
            async for reply in method(self, request, traceparent):
                yield reply
        except KVGrpcError as error:
            await status.abort(context, error)
        except (grpc.aio.AbortError, grpc.aio.UsageError):
            raise
        except Exception as error:  # noqa: BLE001 - no request may stop the server
            _log.exception("%s failed", name)
            await status.abort(context, InternalError(Reason.INTERNAL, f"a defect of kvgrpc: {error!r}"))

    return call


def _name(method: Callable[..., Any]) -> str:
    service, _, rpc = method.__qualname__.rpartition(".")
    return f"{service.removesuffix('Servicer')}/{rpc}"
