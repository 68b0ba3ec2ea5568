"""Spans say what went on in nearly all the time of a request, whatever its kind and however it ends."""

from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage

from tests.e2e import otlp
from tests.operators.accounting import accounted
from tests.operators.jaeger import Span
from tests.operators.traces import Tracer, TracesFound, make_all

RPC = (SpanMessage.SPAN_KIND_CLIENT, SpanMessage.SPAN_KIND_SERVER)
SHARE_MIN = 0.9
"""Minimum share of a request that spans account for, in the best of some: a busy machine stops processes in between."""


def as_shown(span: otlp.Span) -> Span:
    client = span.service == "client"
    service, instance = ("client", "") if client else ("kvgrpc", span.service)
    start, end = span.start_ns // 1000, span.end_ns // 1000
    rpc = span.kind in RPC
    return Span(service, instance, span.name, span.span_id, span.parent_id, start, end, failed=span.failed, is_rpc=rpc)


async def test_spans_account_for_every_kind_of_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with otlp.collecting() as collector:
        tracer = Tracer(collector.endpoint)
        monkeypatch.setattr(trace, "_TRACER_PROVIDER", tracer.provider)
        ids = await make_all(tracer, collector.endpoint, tmp_path)
    found = TracesFound(
        {what: [as_shown(span) for span in collector.spans if span.trace_id == id_] for what, id_ in ids.items()}
    )
    assert found.orphans() == []
    best: dict[str, float] = {}
    waits: dict[str, set[str]] = {}
    for (what, _), spans in found.traces.items():
        best[what] = max(best.get(what, 0.0), accounted([spans]))
        waits.setdefault(what, set()).update(span.name for span in spans)
    assert {what: share for what, share in best.items() if share < SHARE_MIN} == {}, found.gaps()
    assert accounted(found.traces.values()) >= SHARE_MIN
    assert "kvgrpc.queue" in waits["pull_before_blocks"]
    assert "kvgrpc.rendezvous" in waits["push_fails"]
    assert "kvgrpc.wait.tensor" in waits["tensor_never_comes"]
    failed = {name for (name, _), spans in found.traces.items() if any(one.failed for one in spans if one.instance)}
    assert failed >= {"pull_other_content", "pull_too_late", "push_fails", "tensor_never_comes"}
