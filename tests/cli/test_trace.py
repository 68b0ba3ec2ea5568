"""`kvgrpc trace`: the spans of both leads as one tree."""

import json
from collections.abc import Iterator

import pytest

from kvgrpc.cli.trace_view import PlacedSpan, in_order, tree
from kvgrpc.client import connect_sync
from kvgrpc.v1 import admin_pb2
from tests.cli.commands import run
from tests.client.serving import Served, served

TOKENS = list(range(32))
TRACE = "ab" * 16
CALLER = "cd" * 8
RING = ("--trace-ring-spans", "1000", "--drain-s", "0")


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Served, Served]]:
    with served("--engine-id", "P", *RING) as p, served("--engine-id", "D", *RING) as d:
        yield p, d


def pulled(p: Served, d: Served, tokens: list[int]) -> str:
    """Pulls, without a trace of the caller's own. Returns the id of the destination's transfer when it is over."""
    with connect_sync(p.address) as source, connect_sync(d.address) as destination:
        handed = source.finished_blocks(source.allocate(2), TOKENS, request_id="chat")
        return destination.pull(handed.grant, tokens, blocks=destination.allocate(2), request_id="chat").transfer_id


def test_a_pull_is_one_tree_with_both_sides_and_no_orphan(servers: tuple[Served, Served]) -> None:
    p, d = servers
    transfer_id = pulled(p, d, TOKENS)
    code, lines, errors = run("trace", transfer_id, p.address, d.address, "--json")
    assert (code, errors) == (0, "")
    said = json.loads(lines[0])
    spans = said["spans"]
    assert said["unasked"] == {}
    assert len({span["trace_id"] for span in spans}) == 1
    ids = {span["span_id"] for span in spans}
    assert [span["name"] for span in spans if not span["parent_span_id"]] == ["kvgrpc.v1.HandoffService/PullBlocks"]
    assert [span for span in spans if span["parent_span_id"] and span["parent_span_id"] not in ids] == []
    assert {span["engine"] for span in spans} == {"P", "D"}
    by_engine = {(span["engine"], span["name"]) for span in spans}
    assert by_engine >= {("D", "kvgrpc.receive"), ("D", "kvgrpc.wire"), ("P", "kvgrpc.peer.v1.PeerService/OpenAccess")}


def test_the_tree_has_whole_ids_offsets_and_the_failure(servers: tuple[Served, Served]) -> None:
    p, d = servers
    transfer_id = pulled(p, d, TOKENS[::-1])
    code, lines, errors = run("trace", transfer_id, d.address, p.address)
    assert (code, errors) == (0, "")
    (received,) = (line for line in lines if "kvgrpc.receive" in line)
    assert f"transfer_id={transfer_id}" in received
    assert "FAILED: CONTENT_MISMATCH" in received
    trace_id = lines[0].removeprefix("trace ")
    assert run("trace", trace_id, d.address, p.address)[1] == lines


def test_a_server_that_cannot_be_asked_is_named_and_the_others_are_shown(servers: tuple[Served, Served]) -> None:
    p, d = servers
    transfer_id = pulled(p, d, TOKENS)
    code, lines, errors = run("trace", transfer_id, d.address, "127.0.0.1:1", "--timeout-s", "1")
    assert code == 1
    assert any("kvgrpc.receive" in line for line in lines)
    assert "127.0.0.1:1 could not be asked" in errors


def test_a_server_that_keeps_no_spans_says_so() -> None:
    with served("--engine-id", "P", "--drain-s", "0") as server:
        code, lines, errors = run("trace", "nothing", server.address)
    assert (code, lines) == (1, [])
    assert f"{server.address} keeps no spans: set trace_ring_spans" in errors
    assert "no server that was asked has a span of nothing" in errors


def placed(span_id: str, parent: str, start: int, failure: str = "") -> PlacedSpan:
    made = admin_pb2.Span(
        trace_id=TRACE, span_id=span_id, parent_span_id=parent, name=span_id, start_time_ns=start, failure=failure
    )
    made.duration.FromNanoseconds(1_000_000)
    return PlacedSpan("127.0.0.1:1", "P", made)


def test_a_span_is_below_its_parent_and_one_of_another_process_says_so() -> None:
    rows = [placed("c", "a", 3_000_000), placed("b", "a", 2_000_000), placed("a", CALLER, 1_000_000, "it broke")]
    lines = tree(in_order([*rows, placed("d", "b", 2_500_000), placed("b", "a", 2_000_000)]))
    assert lines == [
        f"trace {TRACE}",
        "      OFFSET     DURATION  ENGINE  SPAN",
        f"     0.000ms      1.000ms  P       a within {CALLER}, which no server has FAILED: it broke",
        "     1.000ms      1.000ms  P         b",
        "     1.500ms      1.000ms  P           d",
        "     2.000ms      1.000ms  P         c",
    ]
