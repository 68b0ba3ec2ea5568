"""A client makes a span for each call that it makes within a recorded span."""

import socket

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, Tracer, format_span_id

from kvgrpc.client import Client, connect
from kvgrpc.errors import KVGrpcError
from tests.client.fake import FakeServer

GET_STATUS = "kvgrpc.v1.AdminService/GetStatus"


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return exporter


@pytest.fixture
def tracer(exported: InMemorySpanExporter) -> Tracer:
    return trace.get_tracer("test")


async def test_a_call_within_a_recorded_span_has_one(
    server: FakeServer, client: Client, tracer: Tracer, exported: InMemorySpanExporter
) -> None:
    with tracer.start_as_current_span("request") as request:
        await client.status()
    call, _ = exported.get_finished_spans()
    expected = (GET_STATUS, SpanKind.CLIENT, server.address)
    assert (call.name, call.kind, (call.attributes or {})["kvgrpc.peer"]) == expected
    assert call.parent == request.get_span_context()
    assert call.context is not None
    assert server.seen[0].metadata["traceparent"][36:52] == format_span_id(call.context.span_id)


async def test_a_call_without_one_has_none(client: Client, exported: InMemorySpanExporter) -> None:
    await client.status()
    assert exported.get_finished_spans() == ()


async def test_the_time_in_which_no_server_is_reached_is_in_it(tracer: Tracer, exported: InMemorySpanExporter) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        async with connect(f"127.0.0.1:{silent.getsockname()[1]}") as client:
            with tracer.start_as_current_span("request"), pytest.raises(KVGrpcError) as raised:
                await client.status(timeout_s=1.0)
    call, request = exported.get_finished_spans()
    assert (call.attributes or {})["error.type"] == raised.value.reason.value
    assert call.status.description == str(raised.value)
    assert request.start_time <= call.start_time <= call.end_time <= request.end_time  # type: ignore[operator]
