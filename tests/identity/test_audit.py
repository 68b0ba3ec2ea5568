"""The audit: what is recorded, for whom, and how much of it is kept."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvgrpc.errors import NotFound, PermissionDenied, Reason
from kvgrpc.server import Server
from kvgrpc.service import audit as module
from kvgrpc.service.audit import AUDITED, DONE, Audit
from kvgrpc.v1 import admin_pb2, admin_pb2_grpc, transfer_pb2
from tests.identity.servers import People, serving, spiffe

KEY = b"a secret of 16 b"


@pytest.fixture
def people(tmp_path: Path) -> People:
    people = People(tmp_path)
    people.give(router="router@red", operator="operator viewer", viewer="viewer", blue="viewer@blue")
    return people


@pytest.fixture
async def server(people: People) -> AsyncIterator[Server]:
    async with serving(people, "e") as server:
        yield server


async def records(people: People, server: Server, who: str) -> list[admin_pb2.AuditRecord]:
    """Returns all records that a caller sees, of pages of two."""
    found: list[admin_pb2.AuditRecord] = []
    async with people.channel(server, who) as channel:
        stub, token = admin_pb2_grpc.AdminServiceStub(channel), ""
        while True:
            request = admin_pb2.ListAuditRecordsRequest(page_size=2, page_token=token)
            page = await stub.ListAuditRecords(request)
            found += page.records
            token = page.next_page_token
            if not token:
                return found


async def act(people: People, server: Server) -> None:
    """Does one of each, as a router and as an operator."""
    async with people.client(server, "router") as router, people.client(server, "operator") as operator:
        granted = await router.grant_lease(await router.allocate(1, ttl_s=60), list(range(16)))
        await router.release_lease(granted.lease.lease_id)
        with pytest.raises(NotFound):
            await router.cancel("t-unknown", message="the client went away")
        await router.cancel(KEY)
        await operator.start_drain("the host goes")
        await operator.cancel_drain()
        await operator.start_drain(validate_only=True)
        await operator.release_quarantine(force=True, message="the host is off")


async def test_each_end_or_change_is_one_record_newest_first(people: People, server: Server) -> None:
    await act(people, server)
    found = await records(people, server, "operator")
    said = [(record.method, record.caller.rpartition("/")[2], record.outcome) for record in reversed(found)]
    assert said == [
        ("ReleaseLease", "router", DONE),
        ("CancelTransfer", "router", "TRANSFER_NOT_FOUND"),
        ("CancelTransfer", "router", DONE),
        ("StartDrain", "operator", DONE),
        ("CancelDrain", "operator", DONE),
        ("ReleaseQuarantine", "operator", DONE),
    ]
    assert found[-1].caller == f"tenant red {spiffe('router')}"
    assert found[-1].target.startswith("lease_id=l-")
    assert found[-1].connection.startswith("ipv4:")
    assert [found[at].message for at in (0, 2)] == ["the host is off", "the host goes"]
    assert [record.number for record in found] == [6, 5, 4, 3, 2, 1]


async def test_a_record_is_a_line_of_the_log_and_has_no_secret(
    people: People, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "kvgrpc.service.audit"):
        await act(people, server)
    lines = [line.message for line in caplog.records if line.name == "kvgrpc.service.audit"]
    assert [json.loads(line.removeprefix("audit "))["method"] for line in lines][:2] == [
        "ReleaseLease",
        "CancelTransfer",
    ]
    assert len(lines) == 6
    assert KEY.decode() not in caplog.text
    assert KEY.hex() not in caplog.text


async def test_a_viewer_with_a_tenant_sees_the_records_of_its_tenant(people: People, server: Server) -> None:
    await act(people, server)
    assert await records(people, server, "blue") == []
    assert len(await records(people, server, "viewer")) == 6
    with pytest.raises(Exception, match="ROLE_MISSING"):
        await records(people, server, "router")


async def test_only_an_operator_drains_and_forgets(people: People, server: Server) -> None:
    async with people.client(server, "viewer") as viewer:
        with pytest.raises(PermissionDenied):
            await viewer.start_drain()
    assert await records(people, server, "operator") == []


def cancel(transfer_id: str) -> transfer_pb2.CancelTransferRequest:
    return transfer_pb2.CancelTransferRequest(transfer_id=transfer_id)


def test_the_oldest_records_go_when_there_are_too_many_or_they_are_too_long() -> None:
    few, short = Audit(rows=3), Audit(nbytes=1_000)
    for number in range(10):
        few.heard("CancelTransfer", cancel(f"t-{number}"), "a")
        short.heard("CancelTransfer", cancel("t" * 200), "a")
    assert [record.target for record in few] == [f"transfer_id=t-{number}" for number in (7, 8, 9)]
    assert sum(record.nbytes for record in short) <= 1_000
    assert [record.number for record in short][-1] == 10


def test_refused_calls_push_out_no_record_of_a_done_one() -> None:
    audit, refusal = Audit(rows=3, refused_rows=4), NotFound(Reason.TRANSFER_NOT_FOUND, "no transfer")
    audit.heard("CancelTransfer", cancel("t-done"), "a")
    for number in range(10):
        audit.heard("CancelTransfer", cancel(f"t-{number}"), f"caller {number}", error=refusal)
    audit.heard("CancelTransfer", cancel("t-last"), "a")
    assert [record.target.removeprefix("transfer_id=t-") for record in audit] == ["done", "6", "7", "8", "9", "last"]
    assert [record.number for record in audit] == [1, 8, 9, 10, 11, 12]


def test_a_caller_has_so_many_records_of_refused_calls_a_minute_and_gaps_show_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [1.0]
    monkeypatch.setattr("kvgrpc.service.audit.time.monotonic", lambda: clock[0])
    audit, refusal = Audit(), NotFound(Reason.TRANSFER_NOT_FOUND, "no transfer")
    with caplog.at_level("INFO", "kvgrpc.service.audit"):
        for caller in ["stranger"] * 100 + ["router"]:
            audit.heard("CancelTransfer", cancel("t-unknown"), caller, error=refusal)
        clock[0] += module.MINUTE_S
        audit.heard("CancelTransfer", cancel("t-unknown"), "stranger", error=refusal)
    found = [(record.caller, record.number) for record in audit]
    assert found[: module.REFUSED_PER_MINUTE] == [("stranger", i + 1) for i in range(module.REFUSED_PER_MINUTE)]
    assert found[module.REFUSED_PER_MINUTE :] == [("router", 101), ("stranger", 102)]
    assert len(caplog.records) == len(found)


def test_callers_whose_refused_calls_are_counted_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CALLERS_MAX", 2)
    audit, refusal = Audit(), NotFound(Reason.TRANSFER_NOT_FOUND, "no transfer")
    for caller in ("a", "b", "c"):
        audit.heard("CancelTransfer", cancel("t-unknown"), caller, error=refusal)
    assert list(audit._minutes) == ["b", "c"]


def test_a_record_is_short_and_of_one_line_whatever_was_said() -> None:
    audit = Audit()
    request = transfer_pb2.CancelTransferRequest(transfer_id="t\n" * 5_000, message="m\x00" * 5_000)
    audit.heard("CancelTransfer", request, "a\nb")
    (record,) = audit
    assert record.nbytes < 4_096
    assert (record.target + record.message + record.caller).isprintable()


def test_calls_that_change_nothing_are_not_recorded() -> None:
    audit = Audit()
    audit.heard("GetTransfer", transfer_pb2.GetTransferRequest(transfer_id="t"), "a")
    audit.heard("CancelTransfer", transfer_pb2.CancelTransferRequest(transfer_id="t", validate_only=True), "a")
    assert list(audit) == []
    assert AUDITED.keys() >= {"CancelTransfer", "ReleaseLease", "ReclaimBlocks", "StartDrain", "ReleaseQuarantine"}
