"""A watch of an engine outlasts streams and servers, and reports when the server cannot be reached."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import pytest

from kvgrpc.client import Client, EngineUnreachable, connect, pauses, watch_engine
from kvgrpc.errors import DeadlineExceeded, InvalidRequest, Unavailable, Unimplemented
from kvgrpc.v1.common_pb2 import ResponseHeader
from kvgrpc.v1.handshake_pb2 import ADMISSION_OPEN, EngineStatus, GetEngineResponse, WatchEngineResponse
from kvgrpc.v1.lease_pb2 import OfferChange, WatchOffersResponse
from tests.client.fake import FakeServer, fail

UNTIL_S = 30


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, "FIRST_S", 0.01)
    monkeypatch.setattr(pauses, "MAX_S", 0.02)


def reply(incarnation: int) -> WatchEngineResponse:
    status = EngineStatus(admission=ADMISSION_OPEN, transfer_count=1)
    return WatchEngineResponse(header=ResponseHeader(engine_id="P", incarnation=incarnation), status=status)


def told(*incarnations: int, ends: bool = True) -> Any:
    """Returns an answer that streams replies, and then ends or stays silent."""

    async def answer(request: Any, context: Any) -> AsyncIterator[WatchEngineResponse]:
        for incarnation in incarnations:
            yield reply(incarnation)
        if not ends:
            await asyncio.Event().wait()

    return answer


async def test_the_engine_as_it_is_now_is_one_call(server: FakeServer, client: Client) -> None:
    server.answers["GetEngine"] = lambda *_: GetEngineResponse(status=EngineStatus(lease_count=3))
    assert (await client.get_engine()).status.lease_count == 3


async def test_a_watch_says_how_often_it_wants_to_be_told(server: FakeServer, client: Client) -> None:
    server.answers["WatchEngine"] = told(1, ends=False)
    async with aclosing(client.watch_engine(min_interval_s=0.25)) as events:
        assert await anext(events) == reply(1)
    assert server.requests("WatchEngine")[0].min_interval.ToTimedelta().total_seconds() == 0.25
    assert (server.seen[0].time_s or 0) < watch_engine.STREAM_S + 1


async def test_a_stream_that_comes_to_its_deadline_is_followed_by_another(
    server: FakeServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_engine, "STREAM_S", 0.1)
    server.answers["WatchEngine"] = told(1, ends=False)
    async with asyncio.timeout(UNTIL_S), aclosing(client.watch_engine()) as events:
        assert [await anext(events) for _ in range(3)] == [reply(1)] * 3


async def test_an_outage_is_told_once_and_the_watch_goes_on(server: FakeServer, client: Client) -> None:
    async with asyncio.timeout(UNTIL_S), aclosing(client.watch_engine()) as events:
        server.answers["WatchEngine"] = told(1, ends=False)
        assert await anext(events) == reply(1)
        await server.stop()
        lost = await anext(events)
        assert isinstance(lost, EngineUnreachable)
        assert isinstance(lost.error, Unavailable)
        server.answers["WatchEngine"] = told(2, ends=False)
        back = asyncio.ensure_future(anext(events))
        done, _ = await asyncio.wait([back], timeout=0.2)
        assert not done, "nothing is told until the server is back"
        await server.start()
        assert await back == reply(2)


async def test_a_server_that_was_never_there_is_unreachable(unused_tcp_port: int) -> None:
    async with asyncio.timeout(UNTIL_S), connect(f"127.0.0.1:{unused_tcp_port}") as client:
        events = client.watch_engine()
        assert isinstance(await anext(events), EngineUnreachable)
        await events.aclose()


async def test_a_silent_server_is_unreachable(
    server: FakeServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_engine, "SILENCE_S", 0.1)
    server.answers["WatchEngine"] = told(1, ends=False)
    async with asyncio.timeout(UNTIL_S), aclosing(client.watch_engine()) as events:
        assert await anext(events) == reply(1)
        silent = await anext(events)
    assert isinstance(silent, EngineUnreachable)
    assert isinstance(silent.error, DeadlineExceeded)


async def test_a_server_that_is_silent_as_its_stream_comes_to_an_end_is_unreachable(
    server: FakeServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_engine, "SILENCE_S", 0.1)
    server.answers["WatchEngine"] = told(1, ends=False)
    async with asyncio.timeout(UNTIL_S), aclosing(client.watch_engine()) as events:
        assert await anext(events) == reply(1)
        monkeypatch.setattr(watch_engine, "STREAM_S", 0.1)  # of a stream that was opened with more
        assert isinstance(await anext(events), EngineUnreachable)


async def test_a_server_that_ends_streams_is_asked_again_after_a_pause(server: FakeServer, client: Client) -> None:
    server.answers["WatchEngine"] = told(1)
    async with asyncio.timeout(UNTIL_S), aclosing(client.watch_engine()) as events:
        seen = [await anext(events) for _ in range(4)]
    assert seen[::2] == [reply(1)] * 2
    assert all(isinstance(event, EngineUnreachable) for event in seen[1::2])


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", InvalidRequest),
        (grpc.StatusCode.UNIMPLEMENTED, "FEATURE_UNAVAILABLE", Unimplemented),
    ],
    ids=["refused", "unknown"],
)
async def test_what_asking_again_cannot_help_is_raised(
    server: FakeServer, client: Client, code: grpc.StatusCode, reason: str, kind: type[Exception]
) -> None:
    async def answer(request: Any, context: Any) -> AsyncIterator[WatchEngineResponse]:
        await fail(context, code, reason)
        yield reply(1)

    server.answers["WatchEngine"] = answer
    with pytest.raises(kind):
        await anext(client.watch_engine())
    assert len(server.seen) == 1


async def test_a_watch_of_offers_goes_on_after_its_last_message(server: FakeServer, client: Client) -> None:
    def message(seq: int) -> WatchOffersResponse:
        header = ResponseHeader(engine_id="P", incarnation=7)
        return WatchOffersResponse(header=header, changes=[OfferChange(offer_number=seq)], offer_seq=seq)

    async def answer(request: Any, context: Any) -> AsyncIterator[WatchOffersResponse]:
        yield message(request.after_offer_seq + 1)
        if request.after_offer_seq == 1:
            await asyncio.Event().wait()

    server.answers["WatchOffers"] = answer
    async with asyncio.timeout(UNTIL_S), aclosing(client.watch_offers(tenant="red")) as events:
        assert await anext(events) == message(1)
        assert isinstance(await anext(events), EngineUnreachable)
        assert await anext(events) == message(2)
    first, second = server.requests("WatchOffers")
    assert (first.tenant, first.after_offer_seq, first.incarnation) == ("red", 0, 0)
    assert (second.tenant, second.after_offer_seq, second.incarnation) == ("red", 1, 7)
    async with aclosing(client.watch_offers(after=message(5))) as events:
        assert await anext(events) == message(6)
