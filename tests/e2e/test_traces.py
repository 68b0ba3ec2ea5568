"""One request is one trace: router, both engines' calls, both leads and the data path, without an orphaned span."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import inject
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from kvgrpc.v1 import common_pb2, handoff_pb2
from tests.e2e.otlp import Collector, Span, collecting
from tests.service.conftest import Start
from tests.service.engines import FAILED, SUCCEEDED, Engine
from tests.service.values import content, dur, for_readers, new_key, prompt

TOKENS = prompt(64)
HAND_OVER, PULL = (f"kvgrpc.v1.HandoffService/{name}" for name in ("FinishedBlocks", "PullBlocks"))
OPEN, SETTLE = (f"kvgrpc.peer.v1.PeerService/{name}" for name in ("OpenAccess", "SettleAccess"))
BETWEEN_LEADS = ("kvgrpc.v1.HandshakeService/Handshake", OPEN, SETTLE)
SERVER, CLIENT = SpanMessage.SPAN_KIND_SERVER, SpanMessage.SPAN_KIND_CLIENT


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


class Router:
    """A router with tracing of its own: every call is a client span under one request."""

    def __init__(self, endpoint: str) -> None:
        self._provider = TracerProvider(resource=Resource.create({"service.name": "router"}))
        self._provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=endpoint, insecure=True)))
        self._tracer = self._provider.get_tracer("router")
        self._root = self._tracer.start_span("request")

    @property
    def trace_id(self) -> str:
        return trace.format_trace_id(self._root.get_span_context().trace_id)

    def call(self, method: Any, request: Any) -> Any:
        parent = trace.set_span_in_context(self._root)
        with self._tracer.start_as_current_span("call", parent, trace.SpanKind.CLIENT):
            carrier: dict[str, str] = {}
            inject(carrier)
            return method(request, metadata=tuple(carrier.items()))

    def end(self) -> None:
        self._root.end()
        self._provider.shutdown()


def run_request(router: Router, source: Engine, destination: Engine, wanted: list[int], label: str) -> int:
    """Makes a hand-over and its pull as the router. Returns the state in which the pull ended."""
    blocks, target = source.allocate(4), destination.allocate(4)
    finished = for_readers(
        transfer_key=new_key(), blocks=source.blocks(blocks), content=content(TOKENS), request_id=label
    )
    grant = router.call(source.api.handoff.FinishedBlocks, finished).grant
    pull = handoff_pb2.PullBlocksRequest(
        grant=grant, content=content(wanted), destination=destination.into(target), request_id=label
    )
    pulled = router.call(destination.api.handoff.PullBlocks, pull).transfer
    end = destination.wait(pulled.transfer_id)
    assert end.trace_id == router.trace_id
    return end.state


def end_all(router: Router, *engines: Engine) -> None:
    """Ends the processes, which then export their remaining spans."""
    router.end()
    for engine in engines:
        engine.process.signal(signal.SIGTERM)
    assert [engine.process.wait_exit() for engine in engines] == [0] * len(engines)


def names(spans: list[Span], service: str) -> set[tuple[str, int]]:
    return {(span.name, span.kind) for span in spans if span.service == service and span.kind in (SERVER, CLIENT)}


def ancestors(spans: list[Span], span: Span) -> list[str]:
    """Returns the names from the span's parent to the root."""
    by_id = {other.span_id: other for other in spans}
    found = []
    while span.parent_id:
        span = by_id[span.parent_id]
        found.append(f"{span.service}/{span.name}")
    return found


def test_a_request_is_one_trace_through_router_leads_and_data_path(start: Start, collector: Collector) -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint}
    source, destination = start(("--engine-id", "p"), ("--engine-id", "d"), **environment)
    router = Router(collector.endpoint)
    assert run_request(router, source, destination, TOKENS, "chat-1") == SUCCEEDED
    end_all(router, source, destination)

    ours = [span for span in collector.spans if span.trace_id == router.trace_id]
    ids = {span.span_id for span in ours}
    assert len(ids) == len(ours)
    assert [span for span in ours if span.parent_id and span.parent_id not in ids] == [], "a span in the air"
    assert [span.name for span in ours if not span.parent_id] == ["request"]
    labelled = [span for span in collector.spans if span.attributes.get("kvgrpc.request_id") == "chat-1"]
    assert {span.trace_id for span in labelled} == {router.trace_id}

    assert names(ours, "p") >= {(name, SERVER) for name in (HAND_OVER, *BETWEEN_LEADS)}
    assert names(ours, "d") >= {(PULL, SERVER), *((name, CLIENT) for name in BETWEEN_LEADS)}
    phases = {span.name: span for span in ours if span.service == "d" and span.kind == SpanMessage.SPAN_KIND_INTERNAL}
    assert phases.keys() == {f"kvgrpc.{name}" for name in ("receive", "handshake", "open", "wire", "settle")}
    for name in ("kvgrpc.wire", "kvgrpc.settle"):
        assert ancestors(ours, phases[name])[:3] == ["d/kvgrpc.receive", f"d/{PULL}", "router/call"]
    (opened,) = (span for span in ours if (span.service, span.name) == ("p", OPEN))
    assert ancestors(ours, opened)[:2] == [f"d/{OPEN}", f"d/{PULL}"]
    (sent,) = (span for span in ours if span.name == "kvgrpc.send")
    assert ancestors(ours, sent) == [f"p/{HAND_OVER}", "router/call", "router/request"]


def test_the_span_of_a_transfer_says_what_moved_and_how(start: Start, collector: Collector) -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint}
    source, destination = start(("--engine-id", "p"), ("--engine-id", "d"), **environment)
    router = Router(collector.endpoint)
    assert run_request(router, source, destination, TOKENS, "good") == SUCCEEDED
    assert run_request(router, source, destination, prompt(64, seed=3), "bad") == FAILED
    end_all(router, source, destination)

    by_label = {span.attributes["kvgrpc.request_id"]: span for span in collector.spans if span.name == "kvgrpc.receive"}
    good, bad = by_label["good"], by_label["bad"]
    assert not good.failed
    said = {name: good.attributes[f"kvgrpc.{name}"] for name in ("blocks", "bytes", "data_path", "peer", "state")}
    assert said == {"blocks": 4, "bytes": 4 * 2048, "data_path": "shm", "peer": "p", "state": "succeeded"}
    assert (bad.failed, bad.attributes["kvgrpc.failure"]) == (True, "CONTENT_MISMATCH")
    children = [span for span in collector.spans if span.parent_id == good.span_id]
    assert all(good.start_ns <= child.start_ns <= child.end_ns <= good.end_ns for child in children)
    assert common_pb2.FailureReason.Name(common_pb2.FAILURE_REASON_CONTENT_MISMATCH).endswith(bad.status)


def test_a_hand_over_that_expires_has_a_span_of_its_whole_life(start: Start, collector: Collector) -> None:
    (source,) = start(("--engine-id", "p"), OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint)
    router = Router(collector.endpoint)
    blocks = source.blocks(source.allocate(4))
    finished = for_readers(
        transfer_key=new_key(), blocks=blocks, content=content(TOKENS), request_id="late", ttl=dur(0.2)
    )
    sent = router.call(source.api.handoff.FinishedBlocks, finished).transfer
    assert source.wait(sent.transfer_id).state == FAILED
    end_all(router, source)

    (span,) = (span for span in collector.spans if span.name == "kvgrpc.send")
    assert (span.trace_id, span.failed, span.attributes["kvgrpc.failure"]) == (router.trace_id, True, "LEASE_EXPIRED")
    assert 0.1e9 < span.end_ns - span.start_ns < 0.5e9


@pytest.mark.parametrize("disabled", ["", "true"])
def test_without_an_exporter_the_trace_is_known_but_not_sent(start: Start, collector: Collector, disabled: str) -> None:
    environment = {"OTEL_SDK_DISABLED": disabled}
    if disabled:
        environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector.endpoint
    source, destination = start((), (), **environment)
    router = Router(collector.endpoint)
    assert run_request(router, source, destination, TOKENS, "quiet") == SUCCEEDED
    end_all(router, source, destination)
    assert {span.service for span in collector.spans} == {"router"}
