"""Rows of `kvgrpc top` from replies: rates, order, filter, and lines that fit."""

from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from kvgrpc.cli.pool_map import letters
from kvgrpc.cli.top.rows import Reading, TopLines, amount, arranged, rows_of, seconds
from kvgrpc.v1 import admin_pb2, common_pb2, lease_pb2, pool_pb2, transfer_pb2

HEADER = common_pb2.ResponseHeader(engine_id="P", incarnation=7)


def reading(at_s: float, *, received: int = 0, header: common_pb2.ResponseHeader = HEADER, **replies: Any) -> Reading:
    counts = admin_pb2.Counts(received_bytes=received, succeeded_transfer_count=received)
    state = admin_pb2.GetStatusResponse(header=header, counts=counts)
    return Reading("p:1", at_s, {"status": state, **replies})


def moved(nbytes: int, **fields: Any) -> transfer_pb2.ListTransfersResponse:
    row = transfer_pb2.Transfer(transfer_id="t-1", moved_bytes=nbytes, total_bytes=1000, **fields)
    return transfer_pb2.ListTransfersResponse(transfers=[row])


def test_a_rate_is_what_moved_between_two_readings() -> None:
    (row,) = rows_of("transfers", reading(12, transfers=moved(500)), reading(10, transfers=moved(100)))
    assert row.values[2:4] == (200.0, 50.0)
    (engine,) = rows_of("engines", reading(12, received=30), reading(10, received=10))
    assert engine.values[6:8] == (10.0, 10.0)


def test_there_is_no_rate_without_an_earlier_reading_of_the_same_life() -> None:
    other = common_pb2.ResponseHeader(engine_id="P", incarnation=8)
    befores = (
        None,
        reading(10, transfers=moved(100), header=other),
        Reading("p:1", 10, error="away"),
        reading(12, transfers=moved(100)),
    )
    for before in befores:
        (row,) = rows_of("transfers", reading(12, transfers=moved(500)), before)
        assert row.values[2] == 0.0


def test_a_lead_that_is_away_is_a_row_of_engines_and_of_nothing_else() -> None:
    away = Reading("p:1", 1, error="UNAVAILABLE: gone")
    (row,) = rows_of("engines", away, None)
    assert row.values[:3] == ("p:1", "away", "p:1")
    assert row.values[-1] == "UNAVAILABLE: gone"
    assert rows_of("leases", away, None) == []
    assert rows_of("leases", reading(1), None) == []
    assert rows_of("pools", reading(1, pool=None, pins=None, allocations=None), None) == []


def leases(*names: str) -> lease_pb2.ListLeasesResponse:
    rows = [
        lease_pb2.Lease(lease_id=name, request_id=f"chat-{name}", remaining=Duration(seconds=index))
        for index, name in enumerate(names)
    ]
    return lease_pb2.ListLeasesResponse(leases=rows)


def test_rows_are_sorted_by_a_column_and_filtered_by_a_text() -> None:
    rows = rows_of("leases", reading(1, leases=leases("b", "c", "a")), None)
    assert [row.name for row in arranged(rows, 2, "", descends=False)] == ["b", "c", "a"]
    assert [row.name for row in arranged(rows, 0, "", descends=True)] == ["c", "b", "a"]
    assert [row.name for row in arranged(rows, 0, "CHAT-A", descends=False)] == ["a"]


def test_blanks_come_last_in_both_orders() -> None:
    rows = [*rows_of("engines", Reading("q:1", 1, error="away"), None), *rows_of("engines", reading(1), None)]
    for descends in (False, True):
        assert [row.address for row in arranged(rows, 3, "", descends=descends)] == ["p:1", "q:1"]


def test_columns_that_do_not_fit_are_left_out_and_ids_are_whole() -> None:
    name = "lease-" + "0123456789" * 4
    rows = rows_of("leases", reading(1, leases=leases(name)), None)
    for width in (20, 60, 200):
        lines = TopLines("leases", rows, width)
        assert lines.line(0).startswith(name)
        assert len(lines.line(0)) <= max(width, len(name))
    assert (TopLines("leases", rows, 20).left_out, TopLines("leases", rows, 200).left_out) == (8, 0)


def test_quarantine_has_its_pins_only_with_the_missing_proof() -> None:
    pins = admin_pb2.ListPinsResponse(
        pins=[
            admin_pb2.Pin(kind=admin_pb2.PIN_KIND_LEASE, owner="l-1"),
            admin_pb2.Pin(kind=admin_pb2.PIN_KIND_QUARANTINE, owner="t-9", missing_proof="settle"),
        ]
    )
    (row,) = rows_of("quarantine", reading(1, pins=pins), None)
    assert (row.name, row.values[3]) == ("t-9", "settle")


def some(*starts: int) -> common_pb2.Blocks:
    runs = common_pb2.BlockRuns(starts=starts, counts=[1] * len(starts))
    return common_pb2.Blocks(groups=[common_pb2.GroupBlocks(runs=runs)])


def test_a_map_shows_the_strongest_of_what_holds_a_block() -> None:
    pins = [
        admin_pb2.Pin(kind=admin_pb2.PIN_KIND_QUARANTINE, blocks=some(2)),
        admin_pb2.Pin(kind=admin_pb2.PIN_KIND_LEASE, blocks=some(1, 2)),
    ]
    allocations = [pool_pb2.Allocation(blocks=some(0, 1))]
    assert letters([0], 6, pins, allocations, 64) == "aLQ..."
    assert letters([0], 6, pins, allocations, 3) == "LQ."


@pytest.mark.parametrize(("value", "shown"), [(0, "     0 B "), (1_500, "   1.5 kB"), (2_000_000_000_000, "2000.0 GB")])
def test_bytes_have_a_unit(value: float, shown: str) -> None:
    assert amount(value) == shown


def test_times_have_a_unit() -> None:
    assert [seconds(value).strip() for value in (1.25, 600, 7200)] == ["1.2s", "10m", "2h"]


def test_what_callers_sent_is_one_line_without_commands_to_the_terminal() -> None:
    rows = rows_of("transfers", reading(1, transfers=moved(1, request_id="a\x1b]0;b\x07\nc")), None)
    line = TopLines("transfers", rows, 500).line(0)
    assert line.isprintable()
    assert "a\\x1b]0;b\\x07\\nc" in line
