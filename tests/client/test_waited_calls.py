"""`pull` and `receive` wait within their call where the server can, and with further calls where it cannot."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from kvgrpc.client import Client, connect, pauses, transfer_waits
from kvgrpc.errors import DeadlineExceeded, PreconditionFailed, Reason, Unavailable
from kvgrpc.v1.common_pb2 import Grant, PeerAddress
from kvgrpc.v1.handoff_pb2 import PullBlocksRequest, PullBlocksResponse, ReserveBlocksResponse
from kvgrpc.v1.transfer_pb2 import (
    TRANSFER_STATE_PENDING,
    TRANSFER_STATE_SUCCEEDED,
    WAIT_CONDITION_ENDED,
    WAIT_CONDITION_RETURNED,
    WAITING_FOR_ACCESS,
    Transfer,
    WaitTransferResponse,
)
from tests.client.fake import FakeServer, failing

GRANT = Grant(token=b"t", lease_id="l")
PEER = PeerAddress(address="127.0.0.1:1")
DONE = Transfer(transfer_id="t", state=TRANSFER_STATE_SUCCEEDED)
PENDING = Transfer(transfer_id="t", state=TRANSFER_STATE_PENDING, waiting_for=WAITING_FOR_ACCESS)
Waits = Callable[..., Any]

CALLS: dict[str, tuple[str, type[Any], Callable[[Client], Waits]]] = {
    "pull": ("PullBlocks", PullBlocksResponse, lambda c: lambda **o: c.pull(GRANT, [2], blocks=[1], **o)),
    "receive": (
        "ReserveBlocks",
        ReserveBlocksResponse,
        lambda c: lambda **o: c.receive(b"k" * 16, [1], [2], PEER, **o),
    ),
}


@pytest.mark.parametrize("name", CALLS)
async def test_one_call_waits_and_gives_the_transfer(server: FakeServer, client: Client, name: str) -> None:
    rpc, response, make = CALLS[name]
    server.answers[rpc] = lambda request, context: response(transfer=DONE, condition_met=True)
    assert await make(client)(timeout_s=20.0) == DONE
    assert await make(client)(returned=True, timeout_s=100.0) == DONE
    short, long = server.requests(rpc)
    assert (short.wait.until, short.wait.timeout.seconds) == (WAIT_CONDITION_ENDED, 20)
    assert (long.wait.until, long.wait.timeout.seconds) == (WAIT_CONDITION_RETURNED, transfer_waits.ONE_WAIT_S)
    assert short.idempotency_key != long.idempotency_key != ""
    assert server.requests("WaitTransfer") == []
    (first, second) = [seen.time_s for seen in server.seen]
    assert first is not None
    assert second is not None
    assert 20 < first <= 20.1 + transfer_waits.ANSWER_S  # leaves time for the answer to arrive
    assert transfer_waits.ONE_WAIT_S < second <= transfer_waits.ONE_WAIT_S + 0.1 + transfer_waits.ANSWER_S


@pytest.mark.parametrize("name", CALLS)
async def test_an_answer_before_the_end_is_waited_on(
    server: FakeServer, client: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older servers answer early, and so do servers on which too many calls wait."""
    monkeypatch.setattr(pauses, "FIRST_S", 0.01)
    rpc, response, make = CALLS[name]
    server.answers[rpc] = lambda request, context: response(transfer=PENDING)
    server.answers["WaitTransfer"] = lambda request, context: WaitTransferResponse(transfer=DONE, condition_met=True)
    assert await make(client)() == DONE
    assert [request.transfer_id for request in server.requests("WaitTransfer")] == ["t"]


async def test_the_end_of_the_time_names_the_phase_and_the_transfer(server: FakeServer, client: Client) -> None:
    async def answer(request: PullBlocksRequest, context: Any) -> PullBlocksResponse:
        await asyncio.sleep(request.wait.timeout.ToTimedelta().total_seconds())
        return PullBlocksResponse(transfer=PENDING)

    server.answers["PullBlocks"] = answer
    server.answers["WaitTransfer"] = lambda request, context: WaitTransferResponse(transfer=PENDING)
    with pytest.raises(DeadlineExceeded) as caught:
        await client.pull(GRANT, [2], blocks=[1], timeout_s=0.05)
    assert caught.value.metadata["phase"] == "access"
    assert caught.value.metadata["transfer_id"] == "t"


async def test_what_refuses_the_call_is_raised(server: FakeServer, client: Client) -> None:
    server.answers["PullBlocks"] = failing(grpc.StatusCode.FAILED_PRECONDITION, "DRAINING")
    with pytest.raises(PreconditionFailed) as caught:
        await client.pull(GRANT, [2], blocks=[1], idempotency_key="mine")
    assert caught.value.reason is Reason.DRAINING
    assert caught.value.metadata["idempotency_key"] == "mine"


async def test_options_become_fields(server: FakeServer, client: Client) -> None:
    server.answers["PullBlocks"] = lambda request, context: PullBlocksResponse(transfer=DONE, condition_met=True)
    server.answers["ReserveBlocks"] = lambda request, context: ReserveBlocksResponse(transfer=DONE, condition_met=True)
    await client.pull("t-1", blocks=[1], have_tokens=16, incarnation=7, after_step=3, transfer_timeout_s=2.0)
    await client.receive(b"k" * 16, [1], [2], PEER, have_tokens=16, incarnation=7, priority=4)
    (pull,), (reservation,) = server.requests("PullBlocks"), server.requests("ReserveBlocks")
    assert (pull.transfer_id, pull.after_step, pull.transfer_timeout.seconds) == ("t-1", 3, 2)
    assert (pull.destination.have_tokens, pull.destination.blocks.incarnation) == (16, 7)
    assert (reservation.have_tokens, reservation.blocks.incarnation, reservation.priority) == (16, 7, 4)
    assert reservation.source == PEER


async def test_a_time_that_is_none_is_refused_before_anything_is_sent(server: FakeServer, client: Client) -> None:
    with pytest.raises(ValueError, match="deadline"):
        await client.pull(GRANT, [2], blocks=[1], timeout_s=0.0)
    assert server.seen == []


async def test_an_unreachable_server_is_an_error_with_the_key_to_repeat(server: FakeServer) -> None:
    await server.stop()
    async with connect(server.address) as client:
        with pytest.raises(Unavailable) as caught:
            await client.pull(GRANT, [2], blocks=[1])
        assert caught.value.metadata["idempotency_key"]
