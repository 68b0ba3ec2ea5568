"""Spans of a lead: which are made, what they say, and that they arrive as the SDK's own would."""

import asyncio
import time

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, ParentBasedTraceIdRatio, Sampler
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id

from kvgrpc.config import Config, PoolConfig
from kvgrpc.errors import NotFound, Reason
from kvgrpc.server import Server
from kvgrpc.service import telemetry
from kvgrpc.service.otlp_spans import LeadExporter, follows_parents
from kvgrpc.service.session.session_calls import hear_session
from kvgrpc.session.v1 import session_pb2
from kvgrpc.v1 import pool_pb2
from tests.service.kept_spans import METHOD, PARENT, SAMPLED, TRACE, UNSAMPLED, Kept, maker, recording


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    return recording(monkeypatch)


def names(kept: Kept) -> list[str]:
    return [span.name for span in kept.spans]


def test_our_messages_are_those_of_the_sdks_encoder() -> None:
    kept = Kept()
    spans = maker(kept)
    root = spans.start("request", SpanKind.INTERNAL, "", {})
    spans.start(METHOD, SpanKind.SERVER, root.traceparent, {"rpc.method": METHOD, "count": 7}).end()
    spans.start(METHOD, SpanKind.CLIENT, SAMPLED, {}, 5).end("NOT_FOUND: no", "NOT_FOUND", at_ns=9)
    root.end()
    exporter = LeadExporter(endpoint="http://127.0.0.1:9")
    assert exporter._translate_data(kept.spans) == encode_spans(kept.spans)
    exporter.shutdown()


@pytest.mark.parametrize(
    ("sampler", "follows"),
    [
        (ParentBased(ALWAYS_ON), True),
        (ParentBased(ALWAYS_OFF), True),
        (ParentBasedTraceIdRatio(0.01), True),
        (ParentBased(ALWAYS_ON, remote_parent_not_sampled=ALWAYS_ON), False),
        (ParentBased(ALWAYS_ON, remote_parent_sampled=ALWAYS_OFF), False),
        (ALWAYS_ON, False),
    ],
)
def test_only_a_sampler_that_does_as_the_context_says_is_not_asked(sampler: Sampler, follows: bool) -> None:
    assert follows_parents(sampler) is follows


def test_a_span_is_within_the_one_of_its_context() -> None:
    kept = Kept()
    span = maker(kept).start(METHOD, SpanKind.SERVER, SAMPLED, {})
    span.end()
    (found,) = kept.spans
    assert found.context is not None
    assert found.parent is not None
    assert (format_trace_id(found.context.trace_id), format_span_id(found.parent.span_id)) == (TRACE, PARENT)
    assert span.traceparent == f"00-{TRACE}-{format_span_id(found.context.span_id)}-01"


def test_what_is_not_sampled_is_passed_on_and_makes_no_span() -> None:
    kept = Kept()
    spans = maker(kept, ALWAYS_OFF)
    within = spans.start(METHOD, SpanKind.SERVER, UNSAMPLED, {})
    root = spans.start(METHOD, SpanKind.SERVER, "", {})
    assert within.traceparent == UNSAMPLED
    assert root.traceparent.endswith("-00")
    assert not spans.records(root.traceparent)
    within.end()
    root.end()
    assert not kept.spans


def test_a_call_that_fails_says_why(kept: Kept) -> None:
    with pytest.raises(NotFound), telemetry.server_span(METHOD, SAMPLED):
        raise NotFound(Reason.LEASE_EXPIRED, "it is over")
    (span,) = kept.spans
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "LEASE_EXPIRED: it is over")
    assert (span.attributes or {})["error.type"] == "LEASE_EXPIRED"


async def test_a_wait_of_a_call_without_a_trace_makes_no_span(kept: Kept) -> None:
    for trace in ("", UNSAMPLED, SAMPLED):
        assert await telemetry.waited("tensor", trace, asyncio.sleep(0, "came")) == "came"
    assert names(kept) == ["kvgrpc.wait.tensor"]


async def test_a_traced_call_of_a_session_has_a_span(kept: Kept) -> None:
    server = Server(Config(listen="127.0.0.1:0", data_paths=("shm",), pool=PoolConfig(blocks=8, layers=1)))
    await server.start()
    try:
        for trace in ("", UNSAMPLED, SAMPLED):
            call = session_pb2.Call(traceparent=trace, allocate_blocks=pool_pb2.AllocateBlocksRequest())
            hear_session(server._lead, call, time.perf_counter(), None)
    finally:
        await server.stop()
    assert names(kept) == ["kvgrpc.session.v1.Call/allocate_blocks"]
