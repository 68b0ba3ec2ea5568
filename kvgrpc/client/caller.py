"""Makes one call, with its deadline, trace context, idempotency key and typed error.

Stubs are called only here and in `call_stream`, `watch`, `renewal_stream` and `step_stream`, so that every call has a
deadline.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar
from uuid import uuid4

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from grpc import aio
from opentelemetry import trace

from kvgrpc.client.call_stream import CallStream
from kvgrpc.client.credentials import BearerToken
from kvgrpc.client.grpc_status import not_begun, not_connected, to_error
from kvgrpc.client.tls_probe import TlsProbe
from kvgrpc.client.values import CALL_OPTIONS, field_of
from kvgrpc.errors import InternalError, KVGrpcError, Reason, Unavailable

Metadata = tuple[tuple[str, str], ...]
Options = Mapping[str, object]
Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)

PAGE_ROWS = 1000
"""Maximum number of rows that a server returns at once."""
NOT_BEGUN_REPEATS = 2
"""Maximum number of repeats of a call that a server which ends has not begun."""


@dataclass(frozen=True)
class Caller:
    """Makes calls to one server."""

    address: str
    timeout_s: float
    """Deadline of a call that states none, in seconds."""
    metadata: Metadata = ()
    """Metadata sent with every call."""
    token: BearerToken | None = None
    probe: TlsProbe | None = None
    """Says why a server cannot be reached; None where nothing is known of the channel's credentials."""
    stream: CallStream | None = None
    """Stream for frequent calls, or None. It changes only what a call costs."""

    def __post_init__(self) -> None:
        checked_timeout(self.timeout_s)

    async def read(
        self, method: "aio.UnaryUnaryMultiCallable[Request, Response]", request: Request, options: Options
    ) -> Response:
        """Makes a unary call. It reads only the `options` of options.Call; the request already holds the others."""
        for name in options:
            if name not in CALL_OPTIONS and field_of(name) not in request.DESCRIPTOR.fields_by_name:
                raise TypeError(f"{_method(request)} has no option {name!r}")
        timeout_s = checked_timeout(options.get("timeout_s", self.timeout_s))
        with self._span(request):
            return await self._reply(method, request, timeout_s)

    async def _reply(
        self, method: "aio.UnaryUnaryMultiCallable[Request, Response]", request: Request, timeout_s: float
    ) -> Response:
        headers, began = self.headers(), time.monotonic()
        if self.stream is not None:
            reply = await self.stream.reply(request, timeout_s, traceparent_of(headers))
            if reply is not None:
                return reply  # type: ignore[return-value]
        repeats = 0
        while True:
            left_s = max(timeout_s - (time.monotonic() - began), 0.0)
            try:
                return await method(request, timeout=left_s, metadata=headers)
            except aio.AioRpcError as failed:
                if repeats == NOT_BEGUN_REPEATS or not not_begun(failed):
                    left_s = timeout_s - (time.monotonic() - began)
                    raise await self.failure(failed, request, left_s) from failed
                repeats += 1

    async def change(
        self, method: "aio.UnaryUnaryMultiCallable[Request, Response]", request: Request, options: Options
    ) -> Response:
        """Makes a call like `read`, with an idempotency key. An error's metadata holds the key, so that the caller can
        retry.
        """
        key = set_key(request, options)
        try:
            return await self.read(method, request, options)
        except KVGrpcError as error:
            error.metadata["idempotency_key"] = key
            raise

    async def pages(
        self, method: "aio.UnaryUnaryMultiCallable[Request, Response]", request: Request, options: Options, rows: str
    ) -> Response:
        """Returns all pages as one reply, or as many as hold `limit` rows; `rows` is the repeated field.

        The reply has the header of the first page. Changes during the fetch come after that header, so a watch from
        there misses nothing.
        """
        limit = checked_limit(options.get("limit"))
        asked: Any = request
        asked.page_size = min(PAGE_ROWS, limit)
        whole: Any = await self.read(method, request, options)
        tokens = set()
        while whole.next_page_token and len(getattr(whole, rows)) < limit:
            if whole.next_page_token in tokens:
                raise InternalError(Reason.INTERNAL, f"{self.address} gave the same page token twice")
            tokens.add(whole.next_page_token)
            asked.page_token = whole.next_page_token
            asked.page_size = min(PAGE_ROWS, limit - len(getattr(whole, rows)))
            page: Any = await self.read(method, request, options)
            getattr(whole, rows).extend(getattr(page, rows))
            whole.next_page_token = page.next_page_token
        return whole  # type: ignore[no-any-return]

    def identity(self) -> Metadata:
        """Returns the client's own metadata, with its token as it is now."""
        return self.metadata if self.token is None else (*self.metadata, *self.token.metadata())

    def headers(self) -> Metadata:
        """Returns the metadata of one call, with the trace context if a span is current."""
        context = trace.get_current_span().get_span_context()
        if not context.is_valid:
            return self.identity()
        parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        state = context.trace_state.to_header()
        return (*self.identity(), ("traceparent", parent), *((("tracestate", state),) if state else ()))

    @contextmanager
    def _span(self, request: Message) -> Iterator[None]:
        """Opens a span round a call, within the current span if that one is recorded: it also has the time in which no
        server is reached.
        """
        if not trace.get_current_span().is_recording():
            yield
            return
        name = _full_name(request.DESCRIPTOR)
        said = {"rpc.system.name": "grpc", "rpc.method": name, "kvgrpc.peer": self.address}
        with trace.get_tracer("kvgrpc").start_as_current_span(
            name, kind=trace.SpanKind.CLIENT, attributes=said, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield
            except Exception as error:
                kind = error.reason.value if isinstance(error, KVGrpcError) else type(error).__name__
                span.set_status(trace.Status(trace.StatusCode.ERROR, str(error)))
                span.set_attribute("error.type", kind)
                raise

    async def failure(self, failed: aio.AioRpcError, request: Message, left_s: float) -> KVGrpcError:
        """Returns the typed error of a failed call or stream, with what TLS prevents. To find that out may take as long
        as `left_s` seconds.
        """
        error = self.error(failed, request)
        if not isinstance(error, Unavailable) or self.probe is None:
            return error
        why = await self.probe.why(failed.details() or "", left_s)
        return not_connected(error, why) if why else error

    def error(self, failed: aio.AioRpcError, request: Message) -> KVGrpcError:
        return to_error(failed, _method(request), self.address)


def traceparent_of(headers: Metadata) -> str:
    """Returns the trace context in a call's metadata, or an empty text."""
    return next((value for key, value in headers if key == "traceparent"), "")


@cache
def _full_name(request: Descriptor) -> str:
    """Returns package.Service/Method of the method that takes such requests."""
    for service in request.file.services_by_name.values():
        for method in service.methods:
            if method.input_type.full_name == request.full_name:
                return f"{service.full_name}/{method.name}"
    return request.full_name


def _method(request: Message) -> str:
    return request.DESCRIPTOR.name.removesuffix("Request")


def set_key(request: Message, options: Options) -> str:
    """Sets the request's idempotency key, the caller's or a fresh one, and returns it."""
    given = options.get("idempotency_key")
    key = str(uuid4()) if given is None else str(given)
    request.idempotency_key = key  # type: ignore[attr-defined]
    return key


def checked_timeout(timeout_s: object) -> float:
    """Returns the timeout. Raises ValueError unless it is a positive, finite number of seconds."""
    if isinstance(timeout_s, int | float) and math.isfinite(timeout_s) and timeout_s > 0:
        return timeout_s
    raise ValueError(f"every call has a deadline: a timeout is a positive number of seconds, not {timeout_s!r}")


def checked_limit(limit: object) -> int:
    """Returns the maximum number of rows to fetch; for None a number larger than any table."""
    if limit is None:
        return 1 << 62
    if isinstance(limit, int) and limit > 0:
        return limit
    raise ValueError(f"a limit is a positive number of rows, not {limit!r}")


def as_metadata(pairs: Mapping[str, str] | Sequence[tuple[str, str]]) -> Metadata:
    """Returns metadata with its keys in lower case, as HTTP/2 requires."""
    items = pairs.items() if isinstance(pairs, Mapping) else pairs
    return tuple((key.lower(), value) for key, value in items)
