"""Traces: one per request, through every call, both leads and the data path.

The W3C context of a call travels in gRPC metadata and session frames, is stored in lease and transfer, and goes on to
peers. A server span is made only when an SDK is installed (`OTEL_*` variables; see `configure`). Without an SDK the
caller's context is passed on, so a lead without tracing never breaks a trace. Stock interceptors cost 40 to 75 % of a
unary call; here a call without context and SDK costs one look at its metadata.

The spans of a transfer and of its phases are made at its end, from the times that the node recorded.
"""

import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TypeVar

from opentelemetry import trace
from opentelemetry.trace import SpanKind

from kvgrpc.core.tables.transfers import Direction, State, Transfer
from kvgrpc.errors import KVGrpcError
from kvgrpc.service.span_makers import TRACEPARENT, OpenSpan, SpanMaker, TracerSpans
from kvgrpc.service.span_ring import TRANSFER, RingSpans, SpanRing, of_caller, of_tenant
from kvgrpc.wire.answers import readable_trace

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
SERVICE = "kvgrpc"
"""Name of the service in traces, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES states another."""
_LOOK_S = 1.0
"""Interval between two looks for an SDK, in seconds: each reads the environment, and every call would pay for it."""

CAME_AT: ContextVar[float] = ContextVar("came_at", default=0.0)
"""Time at which the call that is served came, on the clock of `time.perf_counter`; 0.0 if it began at once."""
Ended = Callable[[Exception | None], None]
"""Callback that ends a span, with the error if there was one."""


def configure(instance_id: str, version: str, ring_spans: int = 0) -> bool:
    """Installs the SDK with an OTLP exporter if OTEL_EXPORTER_OTLP_ENDPOINT names one. Returns whether it did. If the
    SDK's packages are missing, it logs a warning and nothing is exported. The last `ring_spans` spans are kept in any
    case.

    All leads are instances of one service, so that a back end lists one service and not one for each engine.
    Everything else follows the standard OTEL_* variables.
    """
    exports = _export(instance_id, version)
    if ring_spans:
        _Sdk.ring = SpanRing(ring_spans)
        _Sdk.spans = RingSpans(_Sdk.ring, _Sdk.spans if exports else None)
        _Sdk.installed = True
    return exports


def _export(instance_id: str, version: str) -> bool:
    endpoint = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if not endpoint or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    try:
        _install({"service.name": SERVICE, "service.instance.id": instance_id, "service.version": version})
    except ImportError as error:
        _log.warning("no trace is exported to %s: %s; install kvgrpc with the extra otel", endpoint, error)
        return False
    return True


def _install(resource: dict[str, str]) -> None:
    """Installs the SDK. The environment overrides `resource`. Raises ImportError if a package is missing."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    from kvgrpc.service.otlp_spans import LeadExporter, OtlpSpans, follows_parents

    exporter: SpanExporter
    if protocol == "http/protobuf":  # the extra has the gRPC exporter only; engines that speak HTTP bring this one
        from opentelemetry.exporter.otlp.proto.http import trace_exporter  # type: ignore[import-not-found]

        exporter = trace_exporter.OTLPSpanExporter()
    else:
        exporter = LeadExporter()
    provider = TracerProvider(resource=Resource.create(resource).merge(OTELResourceDetector().detect()))
    processor = BatchSpanProcessor(exporter)
    provider.add_span_processor(processor)
    trace.set_tracer_provider(provider)
    _Sdk.installed = True
    if follows_parents(provider.sampler):
        _Sdk.spans = OtlpSpans(provider.resource, provider.sampler, processor)


class _Sdk:
    """State of the SDK, as last seen. An installed SDK stays installed."""

    installed = False
    look_at = 0.0
    spans: SpanMaker = TracerSpans()
    ring: SpanRing | None = None


def ring() -> SpanRing | None:
    """Returns the last spans of this process; None if it keeps none."""
    return _Sdk.ring


def enabled() -> bool:
    """Returns whether spans are wanted: this server, or the process that embeds it, has installed an SDK. A new SDK is
    noticed within a second.
    """
    if not _Sdk.installed and (now := time.monotonic()) >= _Sdk.look_at:
        _Sdk.installed = type(trace.get_tracer_provider()).__module__.startswith("opentelemetry.sdk")
        _Sdk.look_at = now + _LOOK_S
    return _Sdk.installed


def records(traceparent: str) -> bool:
    """Returns whether a span within that context may be recorded. The context itself is passed on if not."""
    if not _Sdk.installed and time.monotonic() < _Sdk.look_at:
        return False  # as `enabled` says, without a call
    return enabled() and _Sdk.spans.records(traceparent)


def flush() -> None:
    """Sends the waiting spans, at the end of a process."""
    shutdown = getattr(trace.get_tracer_provider(), "shutdown", None)
    if shutdown is not None:
        shutdown()


def traceparent_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Returns the caller's traceparent; empty if there is no readable one."""
    for key, value in metadata or ():
        if key == TRACEPARENT and isinstance(value, str):
            return readable_trace(value)
    return ""


@contextmanager
def server_span(method: str, traceparent: str, *, stream: bool = False) -> Iterator[str]:
    """Opens a span round a call that we serve, or round the wait for the first reply of a `stream`; yields the
    traceparent for inner calls. Needs `records`. `method` is package.Service/Method, here and in all that follows. The
    span begins when the call came, and has one within it for the time until its turn.
    """
    came_at = CAME_AT.get()
    start_ns = _wall_ns(came_at) if came_at else None
    attributes = _stream(method) if stream else _rpc(method)
    with _around(of_caller(_Sdk.spans.start(method, SpanKind.SERVER, traceparent, attributes, start_ns))) as inner:
        if start_ns is not None:
            _wait_ended("turn", inner, start_ns)
        yield inner


def stream_answered(method: str, traceparent: str, began: float, failure: str, error_type: str) -> None:
    """Makes the span of a traced stream that has just had its first reply, as `server_span` would. `failure` says why
    that is a refusal; empty: it is none.
    """
    if traceparent and records(traceparent):
        span = of_caller(_Sdk.spans.start(method, SpanKind.SERVER, traceparent, _stream(method), _wall_ns(began)))
        span.end(failure, error_type)


def stream_failed(traceparent: str, error: KVGrpcError) -> None:
    """Makes the span of a failure after the first reply of a served stream. `traceparent`: that of the stream's span;
    empty: there is none.
    """
    if traceparent and records(traceparent):
        _end(of_caller(_Sdk.spans.start("kvgrpc.stream.failed", SpanKind.INTERNAL, traceparent, {})), error)


async def waited(what: str, traceparent: str, wait: Awaitable[_T]) -> _T:
    """Awaits what a caller can feel, such as a tensor, in a span of its own if the call has a trace."""
    if not traceparent or not records(traceparent):
        return await wait
    with _around(_Sdk.spans.start(f"kvgrpc.wait.{what}", SpanKind.INTERNAL, traceparent, {})):
        return await wait


def wait_ended(what: str, traceparent: str, began: float) -> None:
    """Makes the span of a wait that has just ended, if its call has a trace. `began` is on the clock of
    `time.perf_counter`, here and in all that follows.
    """
    if traceparent and records(traceparent):
        _wait_ended(what, traceparent, _wall_ns(began))


def _wait_ended(what: str, traceparent: str, start_ns: int) -> None:
    _Sdk.spans.start(f"kvgrpc.wait.{what}", SpanKind.INTERNAL, traceparent, {}, start_ns).end()


@contextmanager
def _around(span: OpenSpan) -> Iterator[str]:
    try:
        yield span.traceparent
    except Exception as error:
        _end(span, error)
        raise
    except BaseException:
        span.end()
        raise
    span.end()


def metadata(traceparent: str) -> tuple[tuple[str, str], ...]:
    """Returns the metadata that carries a traceparent."""
    return ((TRACEPARENT, traceparent),) if traceparent else ()


def call_span(method: str, traceparent: str, peer: str = "") -> tuple[str, Ended]:
    """Opens a span round a call that we make at `peer`, or without one a call that we serve and whose answer comes from
    elsewhere. Returns the traceparent for inner calls, and the callback that ends the span.
    """
    if not records(traceparent):
        return traceparent, _nothing
    attributes = _rpc(method) | ({"kvgrpc.peer": peer} if peer else {})
    span = _Sdk.spans.start(method, SpanKind.CLIENT if peer else SpanKind.SERVER, traceparent, attributes)
    return span.traceparent, lambda error: _end(span, error)


def root_span(method: str) -> tuple[str, Ended] | None:
    """Opens the first span of a trace, round a call over a session whose engine has no trace, if spans are kept here:
    no other process has a span for it then. Returns as `call_span` does.
    """
    return call_span(method, "") if _Sdk.ring is not None else None


def call_ended(method: str, traceparent: str, began: float, error: BaseException | None) -> None:
    """Makes the span of a traced call that has just ended, over a session or before its method began. What a session's
    call began belongs to the engine's own span, so that a trace looks alike however an engine calls.
    """
    if traceparent and records(traceparent):
        span = _Sdk.spans.start(method, SpanKind.SERVER, traceparent, _rpc(method), _wall_ns(began))
        _end(of_caller(span), error)


def _wall_ns(at: float) -> int:
    """Returns the time since the Unix epoch for one on the clock of `time.perf_counter`."""
    return time.time_ns() - int((time.perf_counter() - at) * 1e9)


def _end(span: OpenSpan, error: BaseException | None) -> None:
    if error is None:
        span.end()
    else:
        kind = error.reason.value if isinstance(error, KVGrpcError) else type(error).__name__
        span.end(str(error) or kind, kind)


@cache
def _rpc(method: str) -> dict[str, str]:
    return {"rpc.system.name": "grpc", "rpc.method": method}


@cache
def _stream(method: str) -> dict[str, str]:
    return _rpc(method) | {"kvgrpc.until": "first reply"}


def _nothing(_: Exception | None) -> None:
    pass


def transfer_ended(clock: Callable[[], float], transfer: Transfer) -> None:
    """Makes the spans of a traced transfer that has just ended: one for it, one for each phase that took time. `clock`
    is the node's clock. A deadline that ended the transfer was a little earlier.
    """
    if transfer.ended is None or not (transfer.trace or _Sdk.ring) or not records(transfer.trace):
        return
    to_wall_ns = time.time_ns() - int(clock() * 1e9)
    name = f"kvgrpc.{transfer.direction.value}"
    began = to_wall_ns + int(transfer.created * 1e9)
    span = of_tenant(
        transfer.tenant, _Sdk.spans.start(name, SpanKind.INTERNAL, transfer.trace, _attributes(transfer), began)
    )
    inner = span.traceparent
    for phase in transfer.phases:
        end = phase.end if phase.end is not None else transfer.ended
        if end > phase.start:
            began = to_wall_ns + int(phase.start * 1e9)
            name = f"kvgrpc.{phase.name}"
            child = of_tenant(transfer.tenant, _Sdk.spans.start(name, SpanKind.INTERNAL, inner, {}, began))
            child.end(at_ns=to_wall_ns + int(end * 1e9))
    failed = str(transfer.failure.reason) if transfer.state is not State.SUCCEEDED and transfer.failure else ""
    span.end(failed, at_ns=to_wall_ns + int(transfer.ended * 1e9))


def _attributes(transfer: Transfer) -> Mapping[str, str | int]:
    found: dict[str, str | int] = {
        TRANSFER: transfer.id,
        "kvgrpc.request_id": transfer.request_id,
        "kvgrpc.state": transfer.state.value,
        "kvgrpc.blocks": transfer.blocks,
        "kvgrpc.bytes": transfer.nbytes,
        "kvgrpc.peer": transfer.peer_engine_id,
    }
    if transfer.direction is Direction.RECEIVE and transfer.paths:
        found["kvgrpc.data_path"] = transfer.paths[0].path.data_path
        found["kvgrpc.descriptors"] = sum(path.descriptors for path in transfer.paths)
    if transfer.failure:
        found["kvgrpc.failure"] = str(transfer.failure.reason)
    return found
