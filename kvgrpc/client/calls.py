"""One call: its deadline, its trace context, its idempotency key, its typed error.

Stubs are called here, in `call_stream`, `watch`, `renewals` and `step_stream`, and nowhere else, so that no call is
without a deadline.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import uuid4

from google.protobuf.message import Message
from grpc import aio
from opentelemetry import trace

from kvgrpc.client.call_stream import CallStream
from kvgrpc.client.status import to_error
from kvgrpc.client.values import CALL_OPTIONS, field_of
from kvgrpc.errors import InternalError, KVGrpcError, Reason

Metadata = tuple[tuple[str, str], ...]
Options = Mapping[str, object]
Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)

PAGE_ROWS = 1000
"""The most that a server gives at once."""


@dataclass(frozen=True)
class Caller:
    """Makes calls to one server."""

    address: str
    timeout_s: float
    """Deadline of a call that states none."""
    metadata: Metadata = ()
    """Sent with every call, for example an `authorization`."""
    stream: CallStream | None = None
    """What carries calls that are made often; invisible but for what they cost."""

    def __post_init__(self) -> None:
        checked_timeout(self.timeout_s)

    async def read(
        self, method: "aio.UnaryUnaryMultiCallable[Request, Response]", request: Request, options: Options
    ) -> Response:
        """A unary call. Of `options` only those of options.Call are read; the others are in the request already."""
        for name in options:
            if name not in CALL_OPTIONS and field_of(name) not in request.DESCRIPTOR.fields_by_name:
                raise TypeError(f"{_method(request)} has no option {name!r}")
        timeout_s = checked_timeout(options.get("timeout_s", self.timeout_s))
        headers = self.headers()
        if self.stream is not None:
            began = time.monotonic()
            reply = await self.stream.reply(request, timeout_s, _traceparent(headers))
            if reply is not None:
                return reply  # type: ignore[return-value]
            timeout_s = max(timeout_s - (time.monotonic() - began), 0.0)
        try:
            return await method(request, timeout=timeout_s, metadata=headers)
        except aio.AioRpcError as failed:
            raise self.error(failed, request) from failed

    async def change(
        self, method: "aio.UnaryUnaryMultiCallable[Request, Response]", request: Request, options: Options
    ) -> Response:
        """As `read`, with an idempotency key. An error's metadata names it, so that the caller can repeat the call."""
        key = set_key(request, options)
        try:
            return await self.read(method, request, options)
        except KVGrpcError as error:
            error.metadata["idempotency_key"] = key
            raise

    async def pages(
        self, method: "aio.UnaryUnaryMultiCallable[Request, Response]", request: Request, options: Options, rows: str
    ) -> Response:
        """All pages as one reply, or as many as hold `limit` rows; `rows` is the repeated field.

        The reply has the header of the first page: what changed while the others were fetched comes after it, so a
        watch from there misses nothing.
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

    def headers(self) -> Metadata:
        """The metadata of one call: with the trace context where a span is current, else as it is."""
        context = trace.get_current_span().get_span_context()
        if not context.is_valid:
            return self.metadata
        parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        state = context.trace_state.to_header()
        return (*self.metadata, ("traceparent", parent), *((("tracestate", state),) if state else ()))

    def error(self, failed: aio.AioRpcError, request: Message) -> KVGrpcError:
        """The typed error of a failed call."""
        return to_error(failed, _method(request), self.address)


class ServerCalls:
    """The channel to one server, and what makes calls over it."""

    def __init__(self, channel: aio.Channel, caller: Caller) -> None:
        self.channel = channel
        """For calls that have no method here: `SomeServiceStub(client.channel)`, with a deadline of your own."""
        self._call = caller


def _traceparent(headers: Metadata) -> str:
    return next((value for key, value in headers if key == "traceparent"), "")


def _method(request: Message) -> str:
    return request.DESCRIPTOR.name.removesuffix("Request")


def set_key(request: Message, options: Options) -> str:
    """Gives a request its idempotency key: the caller's, or a fresh one."""
    given = options.get("idempotency_key")
    key = str(uuid4()) if given is None else str(given)
    request.idempotency_key = key  # type: ignore[attr-defined]
    return key


def checked_timeout(timeout_s: object) -> float:
    """Raises ValueError unless it is a positive, finite number of seconds."""
    if isinstance(timeout_s, int | float) and math.isfinite(timeout_s) and timeout_s > 0:
        return timeout_s
    raise ValueError(f"every call has a deadline: a timeout is a positive number of seconds, not {timeout_s!r}")


def checked_limit(limit: object) -> int:
    """The number of rows to fetch; more than there can be for None."""
    if limit is None:
        return 1 << 62
    if isinstance(limit, int) and limit > 0:
        return limit
    raise ValueError(f"a limit is a positive number of rows, not {limit!r}")


def as_metadata(pairs: Mapping[str, str] | Sequence[tuple[str, str]]) -> Metadata:
    """Metadata with its keys in lower case, as HTTP/2 has them."""
    items = pairs.items() if isinstance(pairs, Mapping) else pairs
    return tuple((key.lower(), value) for key, value in items)
