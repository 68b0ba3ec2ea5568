"""Frequent calls share a stream, and behave exactly like single calls."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from kvgrpc.client import Client, call_stream, connect
from kvgrpc.errors import DeadlineExceeded, InternalError, NextStep, NotFound, Reason, Unavailable
from kvgrpc.v1.calls_pb2 import StreamCallsResponse, UnaryAnswer
from kvgrpc.v1.common_pb2 import Grant
from kvgrpc.v1.handoff_pb2 import PullBlocksResponse
from kvgrpc.v1.transfer_pb2 import GetTransferResponse, Transfer
from tests.client.fake import FakeServer, fail, failing
from tests.client.streams.streaming import StreamingServer, until, warm

GRANT = Grant(token=b"t", lease_id="l")


@pytest.fixture
async def server() -> AsyncIterator[StreamingServer]:
    fake = StreamingServer()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_stream, "RETRY_S", 0.0)


async def hang(request: Any, context: Any) -> Any:
    await asyncio.Event().wait()


async def test_a_client_that_calls_once_opens_no_stream(server: StreamingServer, client: Client) -> None:
    await client.get_transfer("t")
    assert server.streams == 0


async def test_calls_that_are_made_often_share_one_stream(server: StreamingServer, client: Client) -> None:
    await warm(client, server)
    await asyncio.gather(
        client.pull_blocks(GRANT, [2]),
        client.finished_blocks([1], [2]),
        client.get_transfer("t"),
        client.cancel("t"),
        client.free([1]),
        client.renew_leases(["l"]),
    )
    expected = ["CancelTransfer", "FinishedBlocks", "FreeBlocks", "GetTransfer", "PullBlocks", "RenewLeases"]
    assert sorted(server.names()) == expected
    assert server.streams == 1


async def test_what_is_seldom_called_is_called_by_itself(server: StreamingServer, client: Client) -> None:
    await warm(client, server)
    await client.status()
    await client.list_transfers()
    assert server.names() == []


async def test_a_long_request_is_called_by_itself(
    server: StreamingServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await warm(client, server)
    monkeypatch.setattr(call_stream, "MESSAGE_BYTES", 1000)
    await client.pull_blocks(GRANT, range(1000))
    assert server.names() == []
    assert len(server.requests("PullBlocks")) == 1


async def test_more_calls_than_the_stream_takes_are_made_by_themselves(
    server: StreamingServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await warm(client, server)
    monkeypatch.setattr(call_stream, "CALLS_MAX", 2)
    await asyncio.gather(*(client.get_transfer("t") for _ in range(5)))
    assert len(server.streamed) == 2
    assert len(server.requests("GetTransfer")) == 5


async def test_answers_come_in_any_order(server: StreamingServer, client: Client) -> None:
    await warm(client, server)
    last = asyncio.Event()

    async def answer(request: Any, context: Any) -> GetTransferResponse:
        if request.transfer_id == "slow":
            await last.wait()
        last.set()
        return GetTransferResponse(transfer=Transfer(transfer_id=request.transfer_id))

    server.answers["GetTransfer"] = answer
    slow, quick = await asyncio.gather(client.get_transfer("slow"), client.get_transfer("quick"))
    assert (slow.transfer.transfer_id, quick.transfer.transfer_id) == ("slow", "quick")
    assert len(server.streamed) == 2


async def test_errors_are_those_of_calls_by_themselves(server: StreamingServer, client: Client) -> None:
    said = {"next": "RECOMPUTE", "engine_id": "E", "incarnation": "7"}
    server.answers["GetTransfer"] = failing(grpc.StatusCode.NOT_FOUND, "TRANSFER_NOT_FOUND", metadata=said)
    found = []
    while len(server.streamed) < 2:
        with pytest.raises(NotFound) as caught:
            await client.get_transfer("t")
        found.append(caught.value)
    assert {(error.reason, error.next, error.engine_id, error.incarnation) for error in found} == {
        (Reason.TRANSFER_NOT_FOUND, NextStep.RECOMPUTE, "E", 7)
    }
    assert len({str(error.metadata) for error in found}) == 1
    assert server.streams == 1


async def test_unavailable_is_repeated_as_it_is_of_calls_by_themselves(server: StreamingServer, client: Client) -> None:
    await warm(client, server)
    failures = iter([True, True, False])

    async def answer(request: Any, context: Any) -> PullBlocksResponse:
        if next(failures):
            await fail(context, grpc.StatusCode.UNAVAILABLE, "NO_POOL")
        return PullBlocksResponse(transfer=Transfer(transfer_id="t"))

    server.answers["PullBlocks"] = answer
    assert (await client.pull_blocks(GRANT, [2])).transfer.transfer_id == "t"
    keys = [request.idempotency_key for request in server.requests("PullBlocks")]
    assert len(keys) == 3
    assert len(set(keys)) == 1
    assert server.names() == ["PullBlocks"]


async def test_unavailable_that_lasts_is_an_error(server: StreamingServer, client: Client) -> None:
    await warm(client, server)
    server.answers["GetTransfer"] = failing(grpc.StatusCode.UNAVAILABLE, "NO_POOL")
    with pytest.raises(Unavailable) as caught:
        await client.get_transfer("t")
    assert caught.value.reason is Reason.NO_POOL


async def test_calls_whose_stream_is_cut_are_made_by_themselves_with_the_same_key(
    server: StreamingServer, client: Client
) -> None:
    await warm(client, server)
    came = asyncio.Event()

    async def answer(request: Any, context: Any) -> PullBlocksResponse:
        if not came.is_set():
            came.set()
            await hang(request, context)
        return PullBlocksResponse(transfer=Transfer(transfer_id="t"))

    server.answers["PullBlocks"] = answer
    call = asyncio.create_task(client.pull_blocks(GRANT, [2]))
    await came.wait()
    server.cut()
    assert (await call).transfer.transfer_id == "t"
    keys = [request.idempotency_key for request in server.requests("PullBlocks")]
    assert len(keys) == 2
    assert len(set(keys)) == 1
    assert server.names() == ["PullBlocks"]


async def test_a_stream_that_ended_is_opened_again(server: StreamingServer, client: Client) -> None:
    await warm(client, server)
    server.cut()
    await warm(client, server)
    assert server.streams == 2


async def test_a_server_that_comes_back_is_called_over_a_stream_again(server: StreamingServer, client: Client) -> None:
    await warm(client, server)
    await server.stop()
    await server.start()
    await warm(client, server)
    assert server.streams == 2


async def test_an_older_server_is_asked_for_a_stream_once() -> None:
    older = FakeServer()
    await older.start()
    tried = 0

    class Counting(grpc.GenericRpcHandler):
        def service(self, handler_call_details: Any) -> None:
            nonlocal tried
            tried += handler_call_details.method.endswith("StreamCalls")

    assert older._server is not None
    older._server.add_generic_rpc_handlers((Counting(),))
    async with connect(older.address) as client:
        for _ in range(20):
            await client.get_transfer("t")
            await asyncio.sleep(0)
    assert len(older.requests("GetTransfer")) == 20
    assert tried <= 1
    await older.stop()


async def test_a_stream_that_carries_nothing_back_is_never_used(server: StreamingServer, client: Client) -> None:
    async def swallow(message: Any, context: Any) -> None:
        pass

    server.rude = swallow
    while not server.streams:
        await client.get_transfer("t")
    for _ in range(20):
        await client.get_transfer("t")
    assert server.streamed == []


async def test_a_call_over_the_stream_has_its_deadline(server: StreamingServer, client: Client) -> None:
    await warm(client, server)
    server.answers["PullBlocks"] = hang
    with pytest.raises(DeadlineExceeded) as caught:
        await client.pull_blocks(GRANT, [2], timeout_s=1.0)
    assert caught.value.reason is Reason.DEADLINE
    assert caught.value.metadata["method"] == "PullBlocks"
    assert caught.value.metadata["phase"] == "call"
    assert caught.value.metadata["idempotency_key"]
    assert server.streamed[0].timeout.ToNanoseconds() == pytest.approx(1e9)
    assert server.alone("PullBlocks") == []


async def test_a_call_that_is_late_is_given_up_where_the_stream_goes_on(
    server: StreamingServer, client: Client
) -> None:
    await warm(client, server)
    server.answers["PullBlocks"] = hang
    late = asyncio.create_task(client.pull_blocks(GRANT, [2], timeout_s=1.0))
    await asyncio.sleep(0)
    await client.get_transfer("t")
    with pytest.raises(DeadlineExceeded):
        await late
    (call,) = [call for call in server.streamed if call.method.endswith("PullBlocks")]
    while call.call_id not in server.given_up:
        await client.get_transfer("t")
    assert server.streams == 1


async def test_a_stream_that_is_silent_for_the_time_of_a_call_is_left(server: StreamingServer, client: Client) -> None:
    await warm(client, server)
    server.answers["PullBlocks"] = hang
    with pytest.raises(DeadlineExceeded):
        await client.pull_blocks(GRANT, [2], timeout_s=0.5)
    await warm(client, server)
    assert server.streams == 2


async def test_a_call_that_is_cancelled_is_given_up(server: StreamingServer, client: Client) -> None:
    await warm(client, server)
    server.answers["PullBlocks"] = hang
    call = asyncio.create_task(client.pull_blocks(GRANT, [2]))
    while not server.requests("PullBlocks"):
        await client.get_transfer("t")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    while not server.given_up:
        await client.get_transfer("t")
    (pull,) = [call for call in server.streamed if call.method.endswith("PullBlocks")]
    assert server.given_up == [pull.call_id]


async def test_each_call_has_the_trace_of_its_caller(server: StreamingServer, client: Client) -> None:
    await warm(client, server)
    for number in (1, 2):
        context = SpanContext(number, 9, is_remote=False, trace_flags=TraceFlags(1))
        with trace.use_span(NonRecordingSpan(context)):
            await client.get_transfer("t")
    await client.get_transfer("t")
    expected = [f"00-{1:032x}-{9:016x}-01", f"00-{2:032x}-{9:016x}-01", ""]
    assert [call.traceparent for call in server.streamed] == expected


async def test_metadata_of_the_client_goes_with_the_stream(server: StreamingServer) -> None:
    seen: list[Any] = []

    async def note(message: Any, context: Any) -> None:
        seen.append(dict(context.invocation_metadata()))

    server.rude = note
    async with connect(server.address, metadata={"authorization": "Bearer x"}) as client:
        while not seen:
            await client.get_transfer("t")
    assert seen[0]["authorization"] == "Bearer x"


async def test_a_stream_without_calls_ends_and_comes_back(
    server: StreamingServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_stream, "IDLE_S", 0.2)
    await warm(client, server)
    await until(lambda: not server._open)
    await warm(client, server)
    assert server.streams == 2


async def test_closing_ends_the_stream_and_its_calls(server: StreamingServer) -> None:
    client = connect(server.address)
    await warm(client, server)
    server.answers["PullBlocks"] = hang
    call = asyncio.create_task(client.pull_blocks(GRANT, [2]))
    await until(lambda: server.streamed)
    await client.close()
    with pytest.raises(Unavailable):
        await call
    await until(lambda: not server._open)


async def test_an_answer_that_cannot_be_read_is_an_error_of_its_call(server: StreamingServer, client: Client) -> None:
    await warm(client, server)

    async def babble(message: Any, context: Any) -> None:
        rows = [
            UnaryAnswer(call_id=1 << 40),
            *(UnaryAnswer(call_id=c.call_id, reply=b"\xff\xff") for c in message.calls),
        ]
        await context.write(StreamCallsResponse(answers=rows))

    server.rude = babble
    with pytest.raises(InternalError):
        await client.get_transfer("t")
    assert server.streams == 1
