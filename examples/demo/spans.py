"""A receiver of OTLP spans for the demo, and the tree of one trace."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import (
    trace_service_pb2 as service_pb2,
    trace_service_pb2_grpc as service_pb2_grpc,
)


@dataclass(eq=False)
class Span:
    """One span, as it was received."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, str]
    children: list["Span"] = field(default_factory=list)

    @property
    def ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


class Receiver(service_pb2_grpc.TraceServiceServicer):
    """Keeps every span that is exported to it."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    async def Export(self, request: service_pb2.ExportTraceServiceRequest, context: Any) -> Any:  # noqa: N802, ARG002
        """OTLP's only method."""
        for resource in request.resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [_span(span, names.get("service.name", "")) for span in scope.spans]
        return service_pb2.ExportTraceServiceResponse()

    def names(self, trace_id: str) -> set[str]:
        """Returns the names of the spans of one trace that have arrived."""
        return {span.name for span in self.spans if span.trace_id == trace_id}

    def tree(self, trace_id: str) -> list[Span]:
        """Returns the roots of one trace, with children in order of time. A span whose parent was not exported is a
        root.
        """
        spans = {span.span_id: span for span in self.spans if span.trace_id == trace_id}
        roots: list[Span] = []
        for span in sorted(spans.values(), key=lambda s: s.start_ns):
            parent = spans.get(span.parent_id)
            (parent.children if parent else roots).append(span)
        return roots


@asynccontextmanager
async def receiver() -> AsyncIterator[tuple[Receiver, dict[str, str]]]:
    """Runs a receiver on loopback. Yields the receiver, and the environment that makes a server export to it."""
    found = Receiver()
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    service_pb2_grpc.add_TraceServiceServicer_to_server(found, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_EXPORTER_OTLP_INSECURE": "true",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    try:
        yield found, environment
    finally:
        await server.stop(grace=1.0)


def _span(span: Any, service: str) -> Span:
    attributes = {a.key: a.value.string_value or str(a.value.int_value) for a in span.attributes}
    return Span(
        name=span.name,
        service=service,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=attributes,
    )
