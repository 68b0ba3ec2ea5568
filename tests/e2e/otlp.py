"""A collector for tests: a real OTLP/gRPC trace service that keeps the spans it receives."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage, Status


@dataclass(frozen=True)
class Span:
    """A span as it arrived."""

    service: str
    """Name of the service; of a lead its engine id, unless OTEL_SERVICE_NAME is set."""
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_ns: int
    end_ns: int
    failed: bool
    status: str
    attributes: dict[str, str | int]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span that was exported to `endpoint`."""

    def __init__(self) -> None:
        self.endpoint = ""
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    @property
    def spans(self) -> list[Span]:
        with self._lock:
            return list(self._spans)

    def Export(  # noqa: N802 - the name of the RPC
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        found = [
            _span(_service(_values(resource.resource.attributes)), span)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans += found
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def collecting() -> Iterator[Collector]:
    """Yields a collector that listens."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait(10)


def _service(resource: dict[str, str | int]) -> str:
    """Returns the name of a service, or of the instance where all leads are one service."""
    name = str(resource["service.name"])
    return str(resource["service.instance.id"]) if name == "kvgrpc" else name


def _span(service: str, span: SpanMessage) -> Span:
    return Span(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=span.kind,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        failed=span.status.code == Status.STATUS_CODE_ERROR,
        status=span.status.message,
        attributes=_values(span.attributes),
    )


def _values(rows: "Any") -> dict[str, str | int]:
    found: dict[str, str | int] = {}
    row: KeyValue
    for row in rows:
        found[row.key] = row.value.int_value if row.value.HasField("int_value") else row.value.string_value
    return found
