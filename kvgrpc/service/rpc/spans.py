"""Spans of the ring, as AdminService lists them."""

from opentelemetry.trace import SpanKind

from kvgrpc.core.tables.transfer_table import TransferTable
from kvgrpc.core.values.owners import meet
from kvgrpc.errors import invalid
from kvgrpc.service.span_ring import SpanRing, SpanRow, seen_by
from kvgrpc.v1 import admin_pb2
from kvgrpc.wire.answers import trace_id
from kvgrpc.wire.enums import numbers
from kvgrpc.wire.values import duration

_KINDS = numbers(admin_pb2.SpanKind, (SpanKind.INTERNAL, SpanKind.SERVER, SpanKind.CLIENT))


def asked_for(
    ring: SpanRing | None, transfers: TransferTable, request: admin_pb2.ListSpansRequest, tenant: str
) -> list[SpanRow]:
    """Returns the spans that a request of a tenant's caller names. Raises InvalidRequest."""
    if bool(request.transfer_id) == bool(request.trace_id):
        raise invalid("trace_id", "state either it or transfer_id")
    if ring is None:
        return []
    trace_ids = {request.trace_id.lower()}
    if request.transfer_id:
        trace_ids = ring.traces_of(request.transfer_id)
        running = transfers.find(request.transfer_id)
        if running is not None and running.trace and meet(tenant, running.tenant):
            trace_ids.add(trace_id(running.trace))
    return [row for one in sorted(trace_ids) for row in seen_by(tenant, ring.of_traces({one}))]


def message(row: SpanRow) -> admin_pb2.Span:
    """Returns the message of a span."""
    return admin_pb2.Span(
        trace_id=row.trace_id,
        span_id=row.context[36:52],
        parent_span_id=row.parent[36:52],
        name=row.name,
        kind=_KINDS[row.kind],
        start_time_ns=row.start_ns,
        duration=duration((row.end_ns - row.start_ns) / 1e9),
        failure=row.failure,
        attributes={key: str(value) for key, value in row.attributes.items()},
    )
