"""Spans as the service makes them, and their making by the SDK that a process has installed.

A span is started with the traceparent of the one that it is within, and gives the traceparent for what is within it.
"""

from collections.abc import Mapping
from typing import Protocol

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

TRACEPARENT = "traceparent"
"""Metadata key of a W3C trace context."""
SCOPE = "kvgrpc"
"""Name of the instrumentation."""
Attributes = Mapping[str, str | int]
_propagator = TraceContextTextMapPropagator()


class OpenSpan(Protocol):
    """A span that was started."""

    @property
    def traceparent(self) -> str:
        """Trace context of what is within the span."""

    def end(self, failure: str = "", error_type: str = "", at_ns: int | None = None) -> None:
        """Ends the span, now or at a time since the Unix epoch. `failure` says why it failed; empty: it did not."""


class SpanMaker(Protocol):
    """Makes spans."""

    def records(self, traceparent: str) -> bool:
        """Returns whether a span within that context may be recorded. If not, the context itself is passed on."""

    def start(
        self, name: str, kind: SpanKind, traceparent: str, attributes: Attributes, start_ns: int | None = None
    ) -> OpenSpan:
        """Starts a span, now or at a time since the Unix epoch."""


class TracerSpan:
    """A span of the SDK's tracer."""

    def __init__(self, span: Span) -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        """Trace context of what is within the span."""
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, trace.set_span_in_context(self._span))
        return carrier.get(TRACEPARENT, "")

    def end(self, failure: str = "", error_type: str = "", at_ns: int | None = None) -> None:
        if failure:
            self._span.set_status(Status(StatusCode.ERROR, failure))
        if error_type:
            self._span.set_attribute("error.type", error_type)
        self._span.end(at_ns)


class TracerSpans:
    """Spans of an SDK that the process has installed by itself: its tracer decides everything."""

    def records(self, traceparent: str) -> bool:  # noqa: ARG002 - its sampler may go by anything
        """Returns True: only the tracer knows."""
        return True

    def start(
        self, name: str, kind: SpanKind, traceparent: str, attributes: Attributes, start_ns: int | None = None
    ) -> TracerSpan:
        within: Context | None = _propagator.extract({TRACEPARENT: traceparent}) if traceparent else None
        tracer = trace.get_tracer(SCOPE)
        return TracerSpan(tracer.start_span(name, within, kind, attributes, start_time=start_ns))
