"""The ring of spans: what it keeps, for how long, and beside which SDK."""

import time

import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Sampler
from opentelemetry.trace import SpanKind, format_span_id

from kvgrpc.config import Config, PoolConfig
from kvgrpc.errors import NotFound, Reason
from kvgrpc.server import Server
from kvgrpc.service import telemetry
from kvgrpc.service.session.session_calls import begin_trace, hear_session
from kvgrpc.service.span_ring import BYTES_PER_SPAN, TRANSFER, RingSpans, SpanRing, SpanRow, seen_by
from kvgrpc.session.v1 import session_pb2
from kvgrpc.v1 import handoff_pb2, pool_pb2
from tests.service.kept_spans import METHOD, SAMPLED, TRACE, UNSAMPLED, Kept, maker


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> SpanRing:
    """Lets this process keep its spans, and returns them."""
    made = SpanRing(100)
    monkeypatch.setattr(telemetry._Sdk, "installed", True)
    monkeypatch.setattr(telemetry._Sdk, "ring", made)
    monkeypatch.setattr(telemetry._Sdk, "spans", RingSpans(made, None))
    return made


def row(number: int, tenant: str | None = None, **attributes: str) -> SpanRow:
    return SpanRow(number, SAMPLED, "", METHOD, SpanKind.SERVER, attributes, 1, 2, "", tenant)


def test_the_last_spans_stay_and_no_more_than_so_many() -> None:
    ring = SpanRing(3)
    for number in range(5):
        ring.add(row(number))
    assert [one.number for one in ring] == [2, 3, 4]


def test_long_spans_push_out_more_than_one() -> None:
    ring = SpanRing(3)
    long = {f"key{number}": "x" * BYTES_PER_SPAN for number in range(3)}
    for number in range(5):
        ring.add(row(number))
    ring.add(row(5, None, **long))
    assert [one.number for one in ring] == []
    ring.add(row(6))
    assert [one.number for one in ring] == [6]


def test_without_an_sdk_a_call_without_a_context_begins_a_trace(ring: SpanRing) -> None:
    root_trace, ended = telemetry.call_span(METHOD, "")
    with telemetry.server_span(METHOD, root_trace):
        pass
    ended(NotFound(Reason.LEASE_EXPIRED, "it is over"))
    within, root = ring
    assert (root.parent, within.parent) == ("", root.context)
    assert within.trace_id == root.trace_id
    assert (within.failure, root.failure) == ("", "LEASE_EXPIRED: it is over")
    assert root.end_ns >= root.start_ns


def test_a_span_within_a_context_has_its_trace_and_what_is_not_sampled_is_not_kept(ring: SpanRing) -> None:
    assert not telemetry.records(UNSAMPLED)
    with telemetry.server_span(METHOD, SAMPLED):
        pass
    (kept,) = ring
    assert (kept.trace_id, kept.parent) == (TRACE, SAMPLED)


@pytest.mark.parametrize(("sampler", "count"), [(None, 1), (ALWAYS_OFF, 0)])
def test_beside_an_sdk_a_span_has_the_ids_of_the_exported_one(sampler: Sampler | None, count: int) -> None:
    ring, exported = SpanRing(10), Kept()
    spans = RingSpans(ring, maker(exported, sampler) if sampler else maker(exported))
    spans.start(METHOD, SpanKind.SERVER, "", {}).end()
    assert [format_span_id(one.context.span_id) for one in exported.spans if one.context] == [
        one.context[36:52] for one in ring
    ]
    assert len(list(ring)) == count


async def test_a_call_of_a_session_that_makes_a_transfer_begins_a_trace(ring: SpanRing) -> None:
    server = Server(Config(listen="127.0.0.1:0", data_paths=("shm",), pool=PoolConfig(blocks=8, layers=1)))
    pull = session_pb2.Call(pull_blocks=handoff_pb2.PullBlocksRequest())
    other = session_pb2.Call(allocate_blocks=pool_pb2.AllocateBlocksRequest())
    traced = session_pb2.Call(traceparent=SAMPLED, pull_blocks=handoff_pb2.PullBlocksRequest())
    for call in (pull, other, traced):
        ended = begin_trace(call)
        hear_session(server._lead, call, time.perf_counter(), None, ended)
    own, told = ring
    assert (own.context, own.parent, other.traceparent) == (pull.traceparent, "", "")
    assert told.parent == SAMPLED


def test_a_tenant_sees_a_whole_trace_only_if_all_its_transfers_are_its_own() -> None:
    transfer = {TRANSFER: "t-1"}
    mine, call, blue_call = row(1, "red", **transfer), row(2, None), row(3, "blue")
    house, theirs = row(4, "", **transfer), row(5, "blue", **transfer)
    assert seen_by("red", [mine, call, blue_call]) == [mine, call]
    assert seen_by("red", [mine, call, house]) == [mine]
    assert seen_by("red", [mine, call, theirs]) == [mine]
    assert seen_by("red", [call]) == []
    assert seen_by("", [mine, call, theirs, house]) == [mine, call, theirs, house]
