"""Spans of a lead that exports by OTLP, at a third of what the SDK's tracer and encoder take: a pull has a dozen.

The SDK's sampler, resource, batches and exporter are used as they are. What happens once for each span is here: ids,
the finished span, and its message.
"""

import random
import time
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage, Status as StatusMessage
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, SamplingResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from kvgrpc.service.span_makers import SCOPE, Attributes

_SAMPLED, _UNSAMPLED = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)
_OK = Status()
_KINDS = {
    SpanKind.INTERNAL: SpanMessage.SPAN_KIND_INTERNAL,
    SpanKind.SERVER: SpanMessage.SPAN_KIND_SERVER,
    SpanKind.CLIENT: SpanMessage.SPAN_KIND_CLIENT,
}
_Place = tuple[SpanContext, SpanContext | None]
"""Context of a span and of the one that it is within."""
_HAS_IS_REMOTE, _IS_REMOTE = 0x100, 0x200
"""Flags of a span's message: whether its parent came from another process."""


def follows_parents(sampler: Sampler) -> bool:
    """Returns whether a sampler does for every span what the trace context says, if there is one."""
    if not isinstance(sampler, ParentBased):
        return False

    def kept(flags: TraceFlags) -> bool:
        parent = NonRecordingSpan(SpanContext(1, 1, is_remote=True, trace_flags=flags))
        return _keeps(sampler.should_sample(set_span_in_context(parent), 1, "", SpanKind.SERVER))

    return kept(_SAMPLED) and not kept(_UNSAMPLED)


def _keeps(result: SamplingResult) -> bool:
    return result.decision is Decision.RECORD_AND_SAMPLE


class _Unrecorded:
    """A span that nobody records."""

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent

    def end(self, failure: str = "", error_type: str = "", at_ns: int | None = None) -> None:
        """Does nothing."""


class _OtlpSpan:
    """A span that is recorded when it ends."""

    def __init__(
        self, maker: "OtlpSpans", what: tuple[str, SpanKind, Attributes], place: _Place, start_ns: int
    ) -> None:
        self._maker, self._what, self._place, self._start_ns = maker, what, place, start_ns

    @property
    def traceparent(self) -> str:
        """Trace context of what is within the span."""
        context, _ = self._place
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"

    def end(self, failure: str = "", error_type: str = "", at_ns: int | None = None) -> None:
        """Hands the span to the batches of the SDK."""
        maker, (context, parent), (name, kind, attributes) = self._maker, self._place, self._what
        span = ReadableSpan(
            name,
            context,
            parent,
            maker.resource,
            {**attributes, "error.type": error_type} if error_type else attributes,
            kind=kind,
            status=Status(StatusCode.ERROR, failure) if failure else _OK,
            start_time=self._start_ns,
            end_time=time.time_ns() if at_ns is None else at_ns,
            instrumentation_scope=maker.scope,
        )
        maker.processor.on_end(span)


class OtlpSpans:
    """Spans of a lead. `sampler`: one that `follows_parents`, which decides about spans without a context."""

    def __init__(self, resource: Resource, sampler: Sampler, processor: SpanProcessor) -> None:
        self.resource, self.processor = resource, processor
        self.scope = InstrumentationScope(SCOPE)
        self._sampler = sampler

    def records(self, traceparent: str) -> bool:
        """Returns whether a span within that context may be recorded."""
        return not traceparent or traceparent[54] in "13579bdf"

    def start(
        self, name: str, kind: SpanKind, traceparent: str, attributes: Attributes, start_ns: int | None = None
    ) -> _OtlpSpan | _Unrecorded:
        parent, span_id = None, random.getrandbits(64)
        if traceparent:
            if not self.records(traceparent):
                return _Unrecorded(traceparent)
            trace_id = int(traceparent[3:35], 16)
            parent = SpanContext(trace_id, int(traceparent[36:52], 16), is_remote=True, trace_flags=_SAMPLED)
        else:
            trace_id = random.getrandbits(128)
            decided = self._sampler.should_sample(None, trace_id, name, kind, attributes)
            if not _keeps(decided):
                return _Unrecorded(f"00-{trace_id:032x}-{span_id:016x}-00")
        context = SpanContext(trace_id, span_id, is_remote=False, trace_flags=_SAMPLED)
        began = time.time_ns() if start_ns is None else start_ns
        return _OtlpSpan(self, (name, kind, attributes), (context, parent), began)


class LeadExporter(OTLPSpanExporter):
    """The SDK's exporter, with a shorter way from our spans to their messages."""

    def _translate_data(self, data: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
        made = super()._translate_data(data[:1])
        messages = made.resource_spans[0].scope_spans[0].spans
        messages.extend(map(_message, data[1:]))
        return made


def _message(span: ReadableSpan) -> SpanMessage:
    context, parent, status = span.context, span.parent, span.status
    assert context is not None
    made = SpanMessage(
        trace_id=context.trace_id.to_bytes(16, "big"),
        span_id=context.span_id.to_bytes(8, "big"),
        name=span.name,
        kind=_KINDS[span.kind],
        start_time_unix_nano=span.start_time or 0,
        end_time_unix_nano=span.end_time or 0,
        attributes=[
            KeyValue(key=key, value=AnyValue(string_value=value))
            if isinstance(value, str)
            else KeyValue(key=key, value=AnyValue(int_value=value))  # type: ignore[arg-type]  # the two kinds there are
            for key, value in (span.attributes or {}).items()
        ],
        flags=_HAS_IS_REMOTE,
    )
    if parent is not None:
        made.parent_span_id = parent.span_id.to_bytes(8, "big")
        made.flags |= _IS_REMOTE
    made.status.SetInParent()
    if status.status_code is StatusCode.ERROR:
        made.status.CopyFrom(StatusMessage(code=StatusMessage.STATUS_CODE_ERROR, message=status.description or ""))
    return made
