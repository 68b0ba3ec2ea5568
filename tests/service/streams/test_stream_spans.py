"""Spans of streams: one until the first reply, however long the stream lasts, and one for a failure after it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from opentelemetry.trace import SpanKind, format_span_id

from kvgrpc.config import Config, PoolConfig
from kvgrpc.server import Server
from kvgrpc.service.callers import TICKET
from kvgrpc.service.span_makers import TRACEPARENT
from kvgrpc.v1 import handshake_pb2, lease_pb2, transfer_pb2
from kvgrpc.v1.handshake_pb2_grpc import HandshakeServiceStub
from kvgrpc.v1.lease_pb2_grpc import LeaseServiceStub
from kvgrpc.v1.transfer_pb2_grpc import TransferServiceStub
from tests.registry.following import until
from tests.service.kept_spans import PARENT, SAMPLED, TRACE, UNSAMPLED, Kept, recording

TRACED = ((TRACEPARENT, SAMPLED),)
WATCH, KEEP_ALIVE = "kvgrpc.v1.HandshakeService/WatchEngine", "kvgrpc.v1.LeaseService/KeepAlive"
FAILED = "kvgrpc.stream.failed"
PATIENCE_S = 30
Watch = Callable[[grpc.aio.Channel], Any]
WATCHES: list[tuple[str, Watch]] = [
    (WATCH, lambda to: HandshakeServiceStub(to).WatchEngine(handshake_pb2.WatchEngineRequest(), metadata=TRACED)),
    (
        "kvgrpc.v1.LeaseService/WatchOffers",
        lambda to: LeaseServiceStub(to).WatchOffers(lease_pb2.WatchOffersRequest(), metadata=TRACED),
    ),
    (
        "kvgrpc.v1.TransferService/WatchTransfers",
        lambda to: TransferServiceStub(to).WatchTransfers(transfer_pb2.WatchTransfersRequest(), metadata=TRACED),
    ),
]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    return recording(monkeypatch)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """Yields a server that counts the calls that ended, as it does for Prometheus."""
    pool = PoolConfig(blocks=8, layers=1)
    made = Server(Config(listen="127.0.0.1:0", metrics="127.0.0.1:0", data_paths=("shm",), pool=pool))
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def channel(server: Server) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield channel


def names(kept: Kept) -> list[str]:
    return [span.name for span in kept.spans]


def watch_engine(channel: grpc.aio.Channel, *metadata: tuple[str, str], **request: Any) -> Any:
    wanted = handshake_pb2.WatchEngineRequest(**request)
    return HandshakeServiceStub(channel).WatchEngine(wanted, metadata=metadata)


def keep_alive(channel: grpc.aio.Channel) -> Any:
    return LeaseServiceStub(channel).KeepAlive(metadata=TRACED)


@pytest.mark.parametrize(("method", "watch"), WATCHES, ids=[name.rpartition("/")[2] for name, _ in WATCHES])
async def test_a_watch_has_a_span_that_ends_with_its_first_reply(
    method: str, watch: Watch, channel: grpc.aio.Channel, kept: Kept
) -> None:
    call = watch(channel)
    await call.read()
    (span,) = kept.spans
    assert not call.done()
    assert (span.name, span.kind) == (method, SpanKind.SERVER)
    assert span.parent is not None
    assert format_span_id(span.parent.span_id) == PARENT
    expected = {"rpc.system.name": "grpc", "rpc.method": method, "kvgrpc.until": "first reply"}
    assert dict(span.attributes or {}) == expected
    call.cancel()


async def test_a_stream_of_many_messages_has_one_span(channel: grpc.aio.Channel, kept: Kept) -> None:
    call = keep_alive(channel)
    for number in range(100):
        await call.write(lease_pb2.KeepAliveRequest(sequence=number))
        assert (await call.read()).sequence == number
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK
    assert names(kept) == [KEEP_ALIVE]


async def test_a_stream_that_is_refused_has_one_span_which_says_why(channel: grpc.aio.Channel, kept: Kept) -> None:
    request = lease_pb2.WatchOffersRequest(after_offer_seq=7)
    with pytest.raises(grpc.aio.AioRpcError, match="INVALID_FIELD"):
        await LeaseServiceStub(channel).WatchOffers(request, metadata=TRACED).read()
    (span,) = kept.spans
    assert (span.attributes or {})["error.type"] == "INVALID_FIELD"


async def test_a_stream_that_fails_after_its_first_reply_has_a_span_for_that_within(
    channel: grpc.aio.Channel, kept: Kept
) -> None:
    call = keep_alive(channel)
    await call.write(lease_pb2.KeepAliveRequest())
    await call.read()
    (span,) = kept.spans
    await call.write(lease_pb2.KeepAliveRequest(leases=[lease_pb2.LeaseRef()]))
    async with asyncio.timeout(PATIENCE_S):
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    await until(lambda: len(kept.spans) == 2)
    failed = kept.spans[1]
    assert (failed.name, failed.kind) == (FAILED, SpanKind.INTERNAL)
    assert (failed.attributes or {})["error.type"] == "INVALID_FIELD"
    assert failed.parent is not None
    assert span.context is not None
    assert failed.parent.span_id == span.context.span_id


@pytest.mark.parametrize(("method", "reads"), [(KEEP_ALIVE, 0), (KEEP_ALIVE, 1), (WATCH, 1)])
async def test_a_caller_that_leaves_is_no_failure(
    method: str, reads: int, server: Server, channel: grpc.aio.Channel, kept: Kept
) -> None:
    call = keep_alive(channel) if method == KEEP_ALIVE else watch_engine(channel, *TRACED)
    if not reads:
        await call.initial_metadata()
    elif method == KEEP_ALIVE:
        await call.write(lease_pb2.KeepAliveRequest())
    if reads:
        await call.read()
    call.cancel()
    # A call is counted when all else of it is over, its spans too.
    await until(lambda: any(name == method for name, _ in server._lead.calls.seconds))
    (span,) = kept.spans
    assert span.status.is_ok or span.status.is_unset


async def test_a_stream_without_a_context_begins_a_trace_and_one_that_is_not_sampled_has_none(
    channel: grpc.aio.Channel, kept: Kept
) -> None:
    for metadata in ((TRACEPARENT, UNSAMPLED),), ():
        call = watch_engine(channel, *metadata)
        await call.read()
        call.cancel()
    (span,) = kept.spans
    assert span.parent is None
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" != TRACE


@pytest.mark.parametrize("metadata", [TRACED, ()], ids=["traced", "bare"])
async def test_a_stream_that_is_not_let_in_writes_nothing_into_traces(
    channel: grpc.aio.Channel, kept: Kept, metadata: tuple[tuple[str, str], ...]
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="NOT_OWNER"):
        await watch_engine(channel, *metadata, (TICKET, "00")).read()
    assert kept.spans == []
