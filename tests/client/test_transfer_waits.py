"""A wait makes one call after another up to a total time, and names the phase in which the time ran out."""

import asyncio
from typing import Any

import grpc
import pytest

from kvgrpc.client import Client, connect, is_over, is_returned, pauses, transfer_waits
from kvgrpc.errors import DeadlineExceeded, Exhausted, InternalError, NotFound, Reason, Unavailable
from kvgrpc.v1.common_pb2 import TRANSFER_PHASE_OPEN, TRANSFER_PHASE_WIRE
from kvgrpc.v1.transfer_pb2 import (
    MEMORY_DISPOSITION_QUARANTINED,
    MEMORY_DISPOSITION_RETURNED,
    TRANSFER_STATE_ACTIVE,
    TRANSFER_STATE_FAILED,
    TRANSFER_STATE_PENDING,
    TRANSFER_STATE_SUCCEEDED,
    WAIT_CONDITION_ENDED,
    WAIT_CONDITION_RETURNED,
    WAIT_FOR_ALL,
    WAIT_FOR_ANY,
    WAITING_FOR_BLOCKS,
    PhaseTiming,
    Transfer,
    WaitedTransfer,
    WaitTransferRequest,
    WaitTransferResponse,
    WaitTransfersRequest,
    WaitTransfersResponse,
)
from tests.client.fake import FakeServer, fail, failing, retry_info

MOVING = [PhaseTiming(phase=phase) for phase in (TRANSFER_PHASE_OPEN, TRANSFER_PHASE_WIRE)]


class Waited:
    """A server's answers to waits. Each wait gets the next transfer, and the last transfer repeats."""

    def __init__(self, *transfers: Transfer) -> None:
        self.transfers = list(transfers)

    async def answer(self, request: WaitTransferRequest, context: Any) -> WaitTransferResponse:
        transfer = self.transfers.pop(0) if len(self.transfers) > 1 else self.transfers[0]
        met = is_returned(transfer) if request.until == WAIT_CONDITION_RETURNED else is_over(transfer)
        if not met:
            await asyncio.sleep(request.timeout.ToTimedelta().total_seconds())
        return WaitTransferResponse(transfer=transfer, condition_met=met)


async def test_wait_returns_the_transfer_however_it_ended(server: FakeServer, client: Client) -> None:
    for state in (TRANSFER_STATE_SUCCEEDED, TRANSFER_STATE_FAILED):
        server.answers["WaitTransfer"] = Waited(Transfer(transfer_id="t", state=state)).answer
        assert (await client.wait("t", timeout_s=0.05)).state == state
    assert {request.until for request in server.requests("WaitTransfer")} == {WAIT_CONDITION_ENDED}


async def test_a_wait_takes_several_calls(server: FakeServer, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_waits, "ONE_WAIT_S", 0.05)
    active, done = Transfer(state=TRANSFER_STATE_ACTIVE), Transfer(state=TRANSFER_STATE_SUCCEEDED)
    server.answers["WaitTransfer"] = Waited(active, active, done).answer
    assert await client.wait("t", timeout_s=20) == done
    assert [seen.request.timeout.ToTimedelta().total_seconds() for seen in server.seen] == [0.05] * 3
    assert all(seen.time_s is not None and seen.time_s < 6 for seen in server.seen)


async def test_wait_for_the_return_of_memory(server: FakeServer, client: Client) -> None:
    held = Transfer(state=TRANSFER_STATE_FAILED, memory=MEMORY_DISPOSITION_QUARANTINED)
    done = Transfer(state=TRANSFER_STATE_SUCCEEDED, memory=MEMORY_DISPOSITION_RETURNED)
    server.answers["WaitTransfer"] = Waited(done).answer
    assert await client.wait("t", returned=True, timeout_s=5) == done
    assert server.requests("WaitTransfer")[0].until == WAIT_CONDITION_RETURNED
    server.answers["WaitTransfer"] = Waited(held).answer
    with pytest.raises(DeadlineExceeded) as raised:
        await client.wait("t", returned=True, timeout_s=0.05)
    assert raised.value.metadata["phase"] == "return"


@pytest.mark.parametrize(
    ("transfer", "phase"),
    [
        (Transfer(state=TRANSFER_STATE_PENDING, waiting_for=WAITING_FOR_BLOCKS), "blocks"),
        (Transfer(state=TRANSFER_STATE_ACTIVE, phases=MOVING), "wire"),
        (Transfer(state=TRANSFER_STATE_PENDING), "queue"),
    ],
    ids=["waits", "moves", "new"],
)
async def test_a_timeout_names_the_phase(server: FakeServer, client: Client, transfer: Transfer, phase: str) -> None:
    server.answers["WaitTransfer"] = Waited(transfer).answer
    with pytest.raises(DeadlineExceeded) as raised:
        await client.wait("t", timeout_s=0.05)
    assert raised.value.reason is Reason.DEADLINE
    assert raised.value.metadata["phase"] == phase


async def test_a_wait_outlasts_a_server_that_is_away(
    server: FakeServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pauses, "FIRST_S", 0.01)
    server.answers["WaitTransfer"] = failing(grpc.StatusCode.UNAVAILABLE, "PEER_UNREACHABLE")
    waited = asyncio.ensure_future(client.wait("t", timeout_s=60))
    while len(server.seen) < 5:  # noqa: ASYNC110 - more calls than gRPC's own retries of one call
        await asyncio.sleep(0.01)
    assert not waited.done()
    done = Transfer(state=TRANSFER_STATE_SUCCEEDED)
    server.answers["WaitTransfer"] = Waited(done).answer
    assert await waited == done


async def test_a_wait_for_a_server_that_stays_away_says_so(unused_tcp_port: int) -> None:
    async with connect(f"127.0.0.1:{unused_tcp_port}") as client:
        with pytest.raises(Unavailable) as raised:
            await client.wait("t", timeout_s=0.5)
    assert raised.value.reason is Reason.PEER_UNREACHABLE


async def test_a_wait_for_what_is_unknown_ends_at_once(server: FakeServer, client: Client) -> None:
    server.answers["WaitTransfer"] = failing(grpc.StatusCode.NOT_FOUND, "TRANSFER_NOT_FOUND")
    with pytest.raises(NotFound):
        await client.wait("t", timeout_s=60)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.DEADLINE_EXCEEDED, ""),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ""),
        (grpc.StatusCode.CANCELLED, ""),
        (grpc.StatusCode.INTERNAL, ""),
        (grpc.StatusCode.UNKNOWN, ""),
    ],
)
async def test_a_wait_goes_on_through_what_passes(
    server: FakeServer, client: Client, monkeypatch: pytest.MonkeyPatch, code: grpc.StatusCode, reason: str
) -> None:
    monkeypatch.setattr(pauses, "FIRST_S", 0.01)
    done = Transfer(state=TRANSFER_STATE_SUCCEEDED)

    async def answer(request: WaitTransferRequest, context: Any) -> WaitTransferResponse:
        if len(server.seen) < 3:
            await fail(context, code, reason)
        return WaitTransferResponse(transfer=done, condition_met=True)

    server.answers["WaitTransfer"] = answer
    assert await client.wait("t", timeout_s=20) == done
    assert len(server.seen) == 3


async def test_a_call_that_is_not_answered_does_not_end_a_wait(
    server: FakeServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pauses, "FIRST_S", 0.01)
    monkeypatch.setattr(transfer_waits, "ONE_WAIT_S", 0.05)
    monkeypatch.setattr(transfer_waits, "ANSWER_S", 0.05)
    done = Transfer(state=TRANSFER_STATE_SUCCEEDED)

    async def answer(request: WaitTransferRequest, context: Any) -> WaitTransferResponse:
        if len(server.seen) == 1:
            await asyncio.Event().wait()
        return WaitTransferResponse(transfer=done, condition_met=True)

    server.answers["WaitTransfer"] = answer
    assert await client.wait("t", timeout_s=20) == done


@pytest.mark.parametrize(
    ("code", "reason", "message", "kind"),
    [
        (grpc.StatusCode.INTERNAL, "INTERNAL", "a defect", InternalError),
        (grpc.StatusCode.INTERNAL, "INTERNAL_DEFECT", "this life is over", InternalError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "", "Received message larger than max (5 vs. 4)", Exhausted),
    ],
)
async def test_a_wait_ends_with_what_asking_again_cannot_help(
    server: FakeServer, client: Client, code: grpc.StatusCode, reason: str, message: str, kind: type[Exception]
) -> None:
    who = {"engine_id": "P", "incarnation": "7"}
    server.answers["WaitTransfer"] = failing(code, reason, message=message, metadata=who)
    with pytest.raises(kind):
        await client.wait("t", timeout_s=60)
    assert len(server.seen) == 1


def check_one_pause(server: FakeServer, timeout_s: float) -> None:
    """Checks that one pause lasted to the end. A last look follows it unless the first answer came too late."""
    first, *later = [request.timeout.ToTimedelta().total_seconds() for request in server.requests("WaitTransfer")]
    assert 0.0 < first <= timeout_s
    assert later in ([0.0], [])


async def test_a_server_that_is_full_says_when_to_come_back(
    server: FakeServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pauses, "FIRST_S", 0.001)
    full = failing(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", details=(retry_info(10.0),))
    server.answers["WaitTransfer"] = full
    with pytest.raises(Exhausted):
        await client.wait("t", timeout_s=0.5)
    check_one_pause(server, 0.5)


@pytest.mark.parametrize("answer_s", [0.0, 0.6], ids=["it answers at once", "its answer takes most of what is left"])
async def test_a_server_that_does_not_wait_is_not_asked_without_a_pause(
    server: FakeServer, client: Client, monkeypatch: pytest.MonkeyPatch, answer_s: float
) -> None:
    for name in ("FIRST_S", "MAX_S"):
        monkeypatch.setattr(pauses, name, 10.0)

    async def answer(request: WaitTransferRequest, context: Any) -> WaitTransferResponse:
        await asyncio.sleep(answer_s)
        return WaitTransferResponse(transfer=Transfer(state=TRANSFER_STATE_ACTIVE))

    server.answers["WaitTransfer"] = answer
    with pytest.raises(DeadlineExceeded):
        await client.wait("t", timeout_s=1.0)
    check_one_pause(server, 1.0)


# ---- many at once


async def test_a_wait_for_many_names_all_of_them_and_how_many_are_enough(server: FakeServer, client: Client) -> None:
    reply = WaitTransfersResponse(
        waited_transfers=[WaitedTransfer(transfer_id="t", condition_met=True)], condition_met=True
    )
    server.answers["WaitTransfers"] = lambda *_: reply
    assert await client.wait_transfers(["t", "u"]) == reply
    assert await client.wait_transfers(["t", "u"], returned=True, any_of=True) == reply
    all_of, any_of = server.requests("WaitTransfers")
    assert (list(all_of.transfer_ids), all_of.wait_for, all_of.until) == (
        ["t", "u"],
        WAIT_FOR_ALL,
        WAIT_CONDITION_ENDED,
    )
    assert (any_of.wait_for, any_of.until) == (WAIT_FOR_ANY, WAIT_CONDITION_RETURNED)


async def test_a_wait_for_many_takes_several_calls(
    server: FakeServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_waits, "ONE_WAIT_S", 0.05)

    async def answer(request: WaitTransfersRequest, context: Any) -> WaitTransfersResponse:
        await asyncio.sleep(request.timeout.ToTimedelta().total_seconds())
        return WaitTransfersResponse(condition_met=len(server.seen) == 3)

    server.answers["WaitTransfers"] = answer
    assert (await client.wait_transfers(["t"], timeout_s=20)).condition_met
    assert len(server.seen) == 3


async def test_many_that_are_not_done_in_time_are_told_as_they_are(server: FakeServer, client: Client) -> None:
    rows = [WaitedTransfer(transfer_id="t", transfer=Transfer(transfer_id="t")), WaitedTransfer(condition_met=True)]
    server.answers["WaitTransfers"] = lambda *_: WaitTransfersResponse(waited_transfers=rows)
    reply = await client.wait_transfers(["t", "u"], timeout_s=0.01)
    assert not reply.condition_met
    assert list(reply.waited_transfers) == rows
