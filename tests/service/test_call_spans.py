"""Spans of calls that did not begin at once, or never did."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind

from kvgrpc.config import Config, PoolConfig
from kvgrpc.server import Server
from kvgrpc.service import call_queue
from kvgrpc.service.callers import TICKET
from kvgrpc.service.span_makers import TRACEPARENT
from kvgrpc.v1 import admin_pb2
from kvgrpc.v1.admin_pb2_grpc import AdminServiceStub
from tests.service.kept_spans import SAMPLED, Kept, recording

TRACED = ((TRACEPARENT, SAMPLED),)
GET_STATUS, TURN = "kvgrpc.v1.AdminService/GetStatus", "kvgrpc.wait.turn"
OTHERS = 64
"""Number of other callers that keep a server busy."""
PATIENCE_S = 30


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    return recording(monkeypatch)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server(Config(listen="127.0.0.1:0", data_paths=("shm",), pool=PoolConfig(blocks=8, layers=1)))
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def stub(server: Server) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield AdminServiceStub(channel)


@pytest.fixture
async def busy(server: Server) -> AsyncIterator[None]:
    """Keeps the server busy with calls of other callers, each of whom always waits for one."""
    queue = server._lead.call_queue

    async def calls(caller: str) -> None:
        while True:
            queue.crowd()
            await queue.enter(caller, patient=True)
            await asyncio.sleep(0)

    others = [asyncio.create_task(calls(f"caller-{number}")) for number in range(OTHERS)]
    yield
    for one in others:
        one.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def test_a_call_that_waits_for_its_turn_has_a_span_for_the_wait(stub: Any, kept: Kept, busy: None) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not kept.named(TURN):
            await stub.GetStatus(admin_pb2.GetStatusRequest(), metadata=TRACED)
    (turn,) = kept.named(TURN)
    call = kept.named(GET_STATUS)[-1]
    assert call.context is not None
    assert turn.parent is not None
    assert turn.parent.span_id == call.context.span_id
    assert call.start_time <= turn.start_time <= turn.end_time <= call.end_time  # type: ignore[operator]


async def test_a_call_that_its_caller_gives_up_before_its_turn_has_a_span(stub: Any, kept: Kept, busy: None) -> None:
    def given_up() -> list[ReadableSpan]:
        return [one for one in kept.named(GET_STATUS) if (one.attributes or {}).get("error.type") == "CancelledError"]

    async with asyncio.timeout(PATIENCE_S):
        while not given_up():
            call = stub.GetStatus(admin_pb2.GetStatusRequest(), metadata=TRACED)
            asyncio.get_running_loop().call_later(0.005, call.cancel)
            await asyncio.wait([asyncio.ensure_future(call.code())])


async def test_a_call_that_is_refused_before_it_begins_has_a_span_that_says_why(
    stub: Any, kept: Kept, busy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> list[ReadableSpan]:
        return [one for one in kept.named(GET_STATUS) if (one.attributes or {}).get("error.type") == "LIMIT_EXCEEDED"]

    monkeypatch.setattr(call_queue, "BYTES_MAX", 0)
    request = admin_pb2.GetStatusRequest.FromString(b"\x78\x01")  # a field that is not known: two bytes
    async with asyncio.timeout(PATIENCE_S):
        while not refused():
            with suppress(grpc.aio.AioRpcError):
                await stub.GetStatus(request, metadata=TRACED)
    assert refused()[0].kind is SpanKind.SERVER


@pytest.mark.parametrize("metadata", [TRACED, ()], ids=["traced", "bare"])
async def test_a_call_that_is_not_let_in_writes_nothing_into_traces(
    stub: Any, kept: Kept, metadata: tuple[tuple[str, str], ...]
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="NOT_OWNER"):
        await stub.GetStatus(admin_pb2.GetStatusRequest(), metadata=(*metadata, (TICKET, "00")))
    assert kept.spans == []
