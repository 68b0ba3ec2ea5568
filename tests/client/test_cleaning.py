"""Clean-up tells every side at the same time, whatever the other sides answer."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from kvgrpc.client import CleanUp, Client, clean_up, clean_up_sync, connect, connect_sync
from kvgrpc.errors import NotFound, Reason, Unavailable
from kvgrpc.v1.transfer_pb2 import CANCEL_OUTCOME_CANCELLED_IN_FLIGHT, CancelTransferRequest, CancelTransferResponse
from tests.client.fake import FakeServer, failing

KEY = b"k" * 16
DONE = CancelTransferResponse(outcome=CANCEL_OUTCOME_CANCELLED_IN_FLIGHT)


@pytest.fixture
async def other() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    await fake.start()
    yield fake
    await fake.stop()


async def test_each_side_cancels_and_frees_what_it_has(server: FakeServer, other: FakeServer, client: Client) -> None:
    for fake in (server, other):
        fake.answers["CancelTransfer"] = lambda *_: DONE
    async with connect(other.address) as second:
        sides = [CleanUp(client, KEY, ["a"]), CleanUp(second, "t-1")]
        assert await clean_up(sides, message="the user left") == [DONE, DONE]
    (first,), (last,) = server.requests("CancelTransfer"), other.requests("CancelTransfer")
    assert (first.transfer_key, list(first.free_allocation_ids), first.message) == (KEY, ["a"], "the user left")
    assert (last.transfer_id, list(last.free_allocation_ids), last.message) == ("t-1", [], "the user left")
    assert first.idempotency_key


async def test_sides_are_told_at_the_same_time(server: FakeServer, other: FakeServer, client: Client) -> None:
    both = asyncio.Barrier(2)

    async def answer(request: CancelTransferRequest, context: Any) -> CancelTransferResponse:
        await both.wait()
        return DONE

    for fake in (server, other):
        fake.answers["CancelTransfer"] = answer
    async with connect(other.address) as second:
        assert await clean_up([CleanUp(client, KEY), CleanUp(second, KEY)]) == [DONE, DONE]


async def test_a_side_that_fails_keeps_no_other_from_being_told(
    server: FakeServer, client: Client, unused_tcp_port: int
) -> None:
    server.answers["CancelTransfer"] = lambda *_: DONE
    async with connect(f"127.0.0.1:{unused_tcp_port}") as away:
        unreachable, outcome = await clean_up([CleanUp(away, KEY), CleanUp(client, KEY)], timeout_s=5.0)
    assert outcome == DONE
    assert isinstance(unreachable, Unavailable)
    server.answers["CancelTransfer"] = failing(grpc.StatusCode.NOT_FOUND, "TRANSFER_NOT_FOUND")
    (refused,) = await clean_up([CleanUp(client, "t-1")])
    assert isinstance(refused, NotFound)
    assert refused.reason is Reason.TRANSFER_NOT_FOUND


async def test_a_side_whose_client_is_closed_keeps_no_other_from_being_told(
    server: FakeServer, other: FakeServer, client: Client
) -> None:
    closed = connect(other.address)

    async def answer(request: CancelTransferRequest, context: Any) -> CancelTransferResponse:
        await closed.close()
        return DONE

    server.answers["CancelTransfer"], other.answers["CancelTransfer"] = lambda *_: DONE, answer
    for _ in ("closed while it is told", "closed before"):
        gone, outcome = await clean_up([CleanUp(closed, KEY), CleanUp(client, KEY)], timeout_s=5.0)
        assert outcome == DONE
        assert isinstance(gone, Unavailable)


async def test_a_caller_that_is_cancelled_tells_all_sides_first(
    server: FakeServer, other: FakeServer, client: Client
) -> None:
    asked, go_on, told = asyncio.Barrier(3), asyncio.Event(), list[FakeServer]()

    def answering(fake: FakeServer) -> Any:
        async def answer(request: CancelTransferRequest, context: Any) -> CancelTransferResponse:
            await asked.wait()
            await go_on.wait()
            told.append(fake)
            return DONE

        return answer

    async def request() -> None:
        async with connect(other.address) as second:  # closed as soon as the cancellation arrives here
            await clean_up([CleanUp(client, KEY), CleanUp(second, KEY)])

    for fake in (server, other):
        fake.answers["CancelTransfer"] = answering(fake)
    async with asyncio.timeout(20):
        task = asyncio.ensure_future(request())
        await asked.wait()
        task.cancel()
        for _ in range(10):  # turns of the loop, so that the cancellation reaches every waiting task
            await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert len(told) == 2


async def test_without_an_event_loop_it_is_the_same(server: FakeServer, other: FakeServer) -> None:
    for fake in (server, other):
        fake.answers["CancelTransfer"] = lambda *_: DONE

    def work() -> list[Any]:
        with connect_sync(server.address) as first, connect_sync(other.address) as second:
            return clean_up_sync([CleanUp(first, KEY, ["a"]), CleanUp(second, KEY)])

    assert await asyncio.to_thread(work) == [DONE, DONE]
    assert list(server.requests("CancelTransfer")[0].free_allocation_ids) == ["a"]
    assert clean_up_sync([]) == []


async def test_without_an_event_loop_a_closed_client_keeps_no_other_from_being_told(
    server: FakeServer, other: FakeServer
) -> None:
    other.answers["CancelTransfer"] = lambda *_: DONE

    def work() -> list[Any]:
        with connect_sync(other.address) as second:
            with connect_sync(server.address) as first:
                pass
            return clean_up_sync([CleanUp(first, KEY), CleanUp(second, KEY)])

    gone, outcome = await asyncio.to_thread(work)
    assert outcome == DONE
    assert isinstance(gone, Unavailable)
