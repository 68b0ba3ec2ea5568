"""The frame of every RPC method: telemetry, and typed errors, also for requests that cannot be parsed."""

import asyncio
import functools
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import grpc.aio
from google.protobuf.message import DecodeError, Message

from kvgrpc.core.values.records import dataclass
from kvgrpc.errors import InternalError, InvalidRequest, KVGrpcError, Reason, too_many
from kvgrpc.service import grpc_status, heap, telemetry
from kvgrpc.service.backlog import Backlog
from kvgrpc.service.call_queue import CallQueue
from kvgrpc.service.call_records import OK
from kvgrpc.service.callers import METADATA, payer
from kvgrpc.service.identity.roles import METHODS
from kvgrpc.service.lead import Answerer
from kvgrpc.service.places import CONNECTION, STANDING_BYTES, CallPlace, Method, Places
from kvgrpc.wire import fields, paths

_log = logging.getLogger(__name__)
WAITS = frozenset({"WaitTransfer", "WaitTransfers", "PollSchedulerNews", "PutTensor", "GetTensor"})
"""Unary methods whose caller decides how long they last: they take standing places, as streams do."""
BOUNDED_BY_ITSELF = frozenset({"ConnectRank"})
"""Methods that bound their own messages: a command to a rank may be as long as over the session socket."""
STANDING_BYTES_MAX = STANDING_BYTES
"""Maximum size of a request that is kept while its call stands, in bytes: the call has one place."""


class Led(Protocol):
    """A service, with the one whose name its errors carry."""

    @property
    def _lead(self) -> Answerer: ...


_Self = TypeVar("_Self", bound=Led)
_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")


class Context(Protocol):
    """The part of a call's context that a method needs."""

    def invocation_metadata(self) -> Any: ...

    def peer(self) -> str: ...


def unary(
    method: Callable[[_Self, _Request, str], Awaitable[_Reply]],
) -> Callable[[_Self, _Request, Any], Awaitable[_Reply]]:
    """Makes a unary RPC of a method (self, request, traceparent)."""
    name = _name(method)

    @functools.wraps(method)
    async def call(self: _Self, request: _Request, context: Any) -> _Reply:
        traceparent = telemetry.traceparent_of(METADATA.get())
        try:
            check_request(request)
            if not telemetry.records(traceparent):
                return await method(self, request, traceparent)
            with telemetry.server_span(name, traceparent) as trace:
                return await method(self, request, trace)
        except KVGrpcError as error:
            await grpc_status.abort(context, paths.placed(error, request), self._lead.header())
        except (grpc.aio.AbortError, grpc.aio.UsageError):
            raise
        except Exception as error:  # noqa: BLE001 - no request may stop the server
            _log.exception("%s failed", name)
            defect = InternalError(Reason.INTERNAL, f"a defect of kvgrpc: {error!r}")
            await grpc_status.abort(context, defect, self._lead.header())
        finally:
            # gRPC's context keeps the error that ends a call, and the error keeps this frame.
            del request, context

    return call


def streaming(
    method: Callable[[_Self, _Request, str], AsyncIterator[_Reply]],
) -> Callable[[_Self, _Request, Any], AsyncIterator[_Reply]]:
    """Makes a streaming RPC of a method (self, request or requests, traceparent). A stream may last for days, so its
    span ends with the first reply, and a later failure has a span within. Messages belong to the caller's trace.
    """
    name = _name(method)

    @functools.wraps(method)
    async def call(self: _Self, request: _Request, context: Any) -> AsyncIterator[_Reply]:
        traceparent, begun = telemetry.traceparent_of(METADATA.get()), ""
        requests: Any = _readable(context, self._lead.call_queue) if isinstance(request, AsyncIterator) else request
        replies: Any = None
        try:
            check_request(request)
            replies = method(self, requests, traceparent)
            if telemetry.records(traceparent):
                with telemetry.server_span(name, traceparent, stream=True) as trace:
                    first = await anext(replies, None)
                begun = trace
                if first is not None:
                    yield first
                del first  # frees it now: the next reply may come much later
            async for reply in replies:
                yield reply
        except KVGrpcError as error:
            telemetry.stream_failed(begun, error)
            await grpc_status.abort(context, paths.placed(error, request), self._lead.header())
        except (grpc.aio.AbortError, grpc.aio.UsageError):
            raise
        except Exception as error:  # noqa: BLE001 - no request may stop the server
            _log.exception("%s failed", name)
            defect = InternalError(Reason.INTERNAL, f"a defect of kvgrpc: {error!r}")
            telemetry.stream_failed(begun, defect)
            await grpc_status.abort(context, defect, self._lead.header())
        finally:
            # gRPC's context keeps the error that ends a call, and the error keeps this frame.
            del request, requests, replies, context

    return call


_FULL_NAMES = {name.rpartition(".")[2]: name for name in METHODS}


def _name(method: Callable[..., Any]) -> str:
    """Returns package.Service/Method."""
    service, _, rpc = method.__qualname__.rpartition(".")
    return _FULL_NAMES[f"{service.removesuffix('Servicer')}/{rpc}"]


@dataclass(frozen=True)
class _Unreadable:
    """Stands for a message that cannot be parsed."""

    why: str


class MethodTable(grpc.GenericRpcHandler):
    """All methods of one server, by their paths. `queue` hears of each call: gRPC asks here when it hands one over.

    Methods that gRPC knows in advance slow every call: its asyncio server keeps a wait for the next call of each, and
    walks over all these waits whenever one of them ends.
    """

    def __init__(self, queue: CallQueue, backlog: Backlog) -> None:
        self.by_path: dict[str, Any] = {}
        self._queue, self._backlog = queue, backlog

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        self._backlog.handed_over += 1
        self._queue.handed_over()
        return self.by_path.get(handler_call_details.method)


class Registrar:
    """Registers generated services in a server's `table`. Each call takes a place: of `standing` if its caller decides
    how long it lasts, else of `calls`. No reply is longer than `message_bytes`. Services that are `ours` refuse
    unparsable requests themselves; gRPC would answer UNKNOWN.
    """

    def __init__(
        self,
        table: MethodTable,
        lead: Answerer,
        standing: Places,
        calls: Places,
        message_bytes: int,
        *,
        ours: bool = True,
    ) -> None:
        self._table, self._standing, self._calls, self._ours = table, standing, calls, ours
        self._lead = lead
        self._message_bytes = message_bytes
        self.unary: dict[str, Any] = {}
        """Framed handlers of all unary methods, by "package.Service/Method"."""

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Does nothing: generated code registers every service in two ways, and the other way is enough."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        bounded = {name: self._bounded(f"{service}/{name}", handler) for name, handler in handlers.items()}
        self.unary |= {f"{service}/{name}": handler for name, handler in bounded.items() if handler.unary_unary}
        self._table.by_path |= {f"/{service}/{name}": handler for name, handler in bounded.items()}

    def _bounded(self, full_name: str, handler: Any) -> Any:
        name = full_name.rpartition("/")[2]
        streams = handler.request_streaming or handler.response_streaming
        write = handler.response_serializer
        if name not in BOUNDED_BY_ITSELF:
            write = _writer(write, self._message_bytes)
            handler = handler._replace(response_serializer=write)
        # Our services keep no request of a request stream.
        keeps = name in WAITS or (streams and not (self._ours and handler.request_streaming))
        if self._ours or keeps:
            handler = handler._replace(request_deserializer=_reader(handler.request_deserializer, keeps=keeps))
        if not streams:
            places = self._standing if name in WAITS else self._calls
            method = self._served(full_name, handler.unary_unary, places, handler.request_deserializer, write)
            return handler._replace(unary_unary=method, request_deserializer=bytes, response_serializer=bytes)
        kind = "stream_stream" if handler.request_streaming else "unary_stream"
        method = _written(getattr(handler, kind))
        method = self._served(full_name, method if self._ours else _checked(method), self._standing)
        return handler._replace(**{kind: method})

    def _served(
        self,
        name: str,
        method: Method,
        places: Places,
        read: Callable[[bytes], object] | None = None,
        write: Callable[[Any], bytes] | None = None,
    ) -> Method:
        """Returns a method that only callers with a role for it reach, when it may begin. It holds a place meanwhile.

        A method with `read` parses its request itself, when it begins: a refused call costs less. A method with `write`
        serializes its reply itself, so that an error in it is an error of the method. A
        library's method that refuses a call returns no reply. The error that ends a call, kept by its context, refers
        to neither context nor request. Each call is counted with its time and its code. A call that is let in and
        ends before its method begins has a span, as the method's own would be. One that is not let in has none: nobody
        without a role writes into traces.
        """
        assert name in METHODS, f"{name} has no row in the table of roles"
        lead, standing = self._lead, self._standing if places is self._calls else None
        queue = lead.call_queue

        async def call(request: Any, context: Any) -> object:
            connection, began, code, waits = context.peer(), time.perf_counter(), OK, False
            CONNECTION.set(connection)
            try:
                place = CallPlace(places, connection, standing)
                try:
                    lead.gate.admit(context, name, lead.ticket)
                    waits = read is not None
                    if queue.busy and await queue.enter(payer(), len(request) if read else 0):
                        telemetry.CAME_AT.set(telemetry.CAME_AT.get() or began)
                    if read is not None:
                        request = read(request)
                    waits = False
                    reply = await method(request, context)
                    return reply if write is None or reply is None else write(reply)
                finally:
                    place.give_back()
            except KVGrpcError as error:
                code = error.code
                if waits:
                    _never_began(name, context, began, error)
                await grpc_status.abort(context, error, lead.header())
            except BaseException as ended:
                if waits:
                    _never_began(name, context, began, ended)
                ended.__traceback__ = None
                code = _code_of(ended)
                raise
            finally:
                if lead.calls.counting:
                    lead.calls.ended(name, code, began)
                del request, context

        return call


def _never_began(name: str, context: Any, came_at: float, error: BaseException) -> None:
    """Makes the span of a call that was let in and never began: it was refused or given up in the queue."""
    if telemetry.enabled():
        trace = telemetry.traceparent_of(context.invocation_metadata())
        telemetry.call_ended(name, trace, telemetry.CAME_AT.get() or came_at, error)


def _code_of(ended: BaseException) -> str:
    """Returns the name of the status code of a call that ended with this."""
    if isinstance(ended, grpc.aio.AbortError):
        return grpc_status.ABORTED_AS.get()
    return (grpc.StatusCode.CANCELLED if isinstance(ended, asyncio.CancelledError) else grpc.StatusCode.UNKNOWN).name


def _reader(parse: Callable[[bytes], object], *, keeps: bool) -> Callable[[bytes], object]:
    """Returns a parser of requests. Refuses a long request if it is kept while its call stands."""

    def read(data: bytes) -> object:
        if len(data) >= heap.LONG_BYTES:
            heap.read_long()
        if keeps and len(data) > STANDING_BYTES_MAX:
            return _Unreadable(f"it has {len(data)} bytes; the limit is {STANDING_BYTES_MAX}")
        try:
            return parse(data)
        except DecodeError as error:
            return _Unreadable(str(error))

    return read


def _writer(serialize: Callable[[Any], bytes], most: int) -> Callable[[Any], bytes]:
    """Returns a serializer of replies, which raises OutOfRange (LIMIT_EXCEEDED) for a reply that is too long."""

    def write(reply: Any) -> bytes:
        data = serialize(reply)
        if len(data) > most:
            raise too_many(f"the reply has {len(data)} bytes; the limit is {most}", most)
        return data

    return write


def _written(method: Callable[[Any, Any], Any]) -> Method:
    """Returns a streaming method that writes its own replies; some methods are generators. A generator's caller gets
    the initial metadata before the first reply: some libraries wait for it before they send anything.
    """
    if inspect.iscoroutinefunction(method):
        return method

    async def call(request: Any, context: Any) -> None:
        try:
            await context.send_initial_metadata(())
            async with aclosing(method(request, context)) as replies:
                async for reply in replies:
                    await context.write(reply)
                    del reply  # frees it now: the next reply may come much later
        finally:
            del request, context

    return call


def _checked(method: Method) -> Method:
    """Returns a streaming method that refuses unparsable requests, for a method that does not check."""

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
        del request  # frees it now: the next request may come much later


def _check_legible(request: object) -> None:
    """Raises InvalidRequest for a message that could not be parsed."""
    if isinstance(request, _Unreadable):
        raise InvalidRequest(Reason.INVALID_FIELD, f"the request cannot be read: {request.why}")


def check_request(request: object) -> None:
    """Raises InvalidRequest for a message that could not be parsed, and all that `fields.check` raises."""
    if isinstance(request, Message):
        fields.check(request)
    else:
        _check_legible(request)


async def _readable(context: Any, queue: CallQueue) -> AsyncIterator[Any]:
    """Yields the requests of a stream, each when it may begin. gRPC's own iterator, left before its end, keeps itself
    and the last request.
    """
    while (request := await context.read()) is not grpc.aio.EOF:
        check_request(request)
        if queue.busy:
            await queue.enter(payer(), patient=True)
        yield request
        del request  # frees it now: the next request may come much later
