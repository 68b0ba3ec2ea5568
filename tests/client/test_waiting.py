"""Waiting is one call after another up to a total, and says in which phase the time ran out."""

import asyncio
from typing import Any

import pytest

from kvgrpc.client import Client, waiting
from kvgrpc.errors import DeadlineExceeded, Reason
from kvgrpc.v1.transfer_pb2 import (
    MEMORY_DISPOSITION_QUARANTINED,
    MEMORY_DISPOSITION_RETURNED,
    TRANSFER_STATE_ACTIVE,
    TRANSFER_STATE_FAILED,
    TRANSFER_STATE_PENDING,
    TRANSFER_STATE_SUCCEEDED,
    WAIT_CONDITION_ENDED,
    WAIT_CONDITION_RETURNED,
    Phase,
    Transfer,
    WaitTransferRequest,
    WaitTransferResponse,
)
from tests.client.fake import FakeServer


class Waited:
    """Answers a wait as a server does: when its time is over, with the next of these transfers; the last stays."""

    def __init__(self, *transfers: Transfer) -> None:
        self.transfers = list(transfers)

    async def answer(self, request: WaitTransferRequest, context: Any) -> WaitTransferResponse:
        transfer = self.transfers.pop(0) if len(self.transfers) > 1 else self.transfers[0]
        if transfer.state != TRANSFER_STATE_SUCCEEDED:
            await asyncio.sleep(request.timeout.ToTimedelta().total_seconds())
        return WaitTransferResponse(transfer=transfer)


async def test_wait_returns_the_transfer_however_it_ended(server: FakeServer, client: Client) -> None:
    for state in (TRANSFER_STATE_SUCCEEDED, TRANSFER_STATE_FAILED):
        server.answers["WaitTransfer"] = Waited(Transfer(transfer_id="t", state=state)).answer
        assert (await client.wait("t", timeout_s=0.05)).state == state
    assert {request.until for request in server.requests("WaitTransfer")} == {WAIT_CONDITION_ENDED}


async def test_a_wait_takes_several_calls(server: FakeServer, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "ONE_WAIT_S", 0.05)
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
        (Transfer(state=TRANSFER_STATE_PENDING, waiting_for="blocks"), "blocks"),
        (Transfer(state=TRANSFER_STATE_ACTIVE, phases=[Phase(name="open"), Phase(name="wire")]), "wire"),
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
