"""A watch neither repeats nor loses a change, however its streams end, and reports where it cannot know."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from hypothesis import given, strategies as st

from kvgrpc.client import Client, HistoryLost, IncarnationChanged, Pace, WatchEvent, connect
from kvgrpc.client.watch import Cursor
from kvgrpc.errors import DeadlineExceeded, InternalError, PermissionDenied, Reason, Unavailable
from kvgrpc.v1.common_pb2 import ResponseHeader
from kvgrpc.v1.handoff_pb2 import PullBlocksResponse
from kvgrpc.v1.transfer_pb2 import (
    ListTransfersResponse,
    Transfer,
    TransferFilter,
    WatchTransfersRequest,
    WatchTransfersResponse,
)
from tests.client.fake import FakeServer, fail, retry_info

BRISK = Pace(give_up_s=5.0, stream_s=60.0, pause_first_s=0.001, pause_max_s=0.01)
UNTIL_S = 20


def change(seq: int, incarnation: int = 7) -> WatchTransfersResponse:
    return WatchTransfersResponse(
        header=ResponseHeader(incarnation=incarnation, event_seq=seq), transfer=Transfer(event_seq=seq)
    )


def stands(seq: int, incarnation: int = 7, *, lost: bool = False) -> WatchTransfersResponse:
    header = ResponseHeader(incarnation=incarnation, event_seq=seq)
    return WatchTransfersResponse(header=header, history_lost=lost)


@dataclass
class Log:
    """The changes of one life as a server keeps them, and the way each stream ends."""

    incarnation: int = 7
    seq: int = 0
    oldest: int = 1
    ends: list[tuple[int, grpc.StatusCode, str]] = field(default_factory=list)
    """For each stream in turn: the number of messages before it ends, then status code and reason."""
    grows_by: int = 0
    """Number of changes that happen before each stream starts."""
    requests: list[WatchTransfersRequest] = field(default_factory=list)
    arrivals: asyncio.Queue[float] = field(default_factory=asyncio.Queue)
    """Opening time of each stream."""

    async def watch(self, request: WatchTransfersRequest, context: Any) -> AsyncIterator[WatchTransfersResponse]:
        self.requests.append(request)
        self.arrivals.put_nowait(asyncio.get_running_loop().time())
        self.seq += self.grows_by
        messages = self.messages(request)
        limit, code, reason = self.ends.pop(0) if self.ends else (1 << 30, grpc.StatusCode.OK, "")
        for message in messages[:limit]:
            yield message
        if limit > len(messages):
            await asyncio.Event().wait()
        if code is not grpc.StatusCode.OK:
            await fail(context, code, reason)

    def messages(self, request: WatchTransfersRequest) -> list[WatchTransfersResponse]:
        after = request.after_event_seq
        if not after:
            return [stands(self.seq, self.incarnation)]
        if after + 1 < self.oldest:
            return [stands(self.seq, self.incarnation, lost=True)]
        later = range(after + 1, self.seq + 1)
        return [stands(after, self.incarnation), *(change(seq, self.incarnation) for seq in later)]


async def read(events: AsyncGenerator[WatchEvent, None], last_seq: int) -> list[WatchEvent]:
    """Returns the events up to the change with number `last_seq`."""
    found = []
    async with asyncio.timeout(UNTIL_S), aclosing(events) as stream:
        async for event in stream:
            found.append(event)
            if isinstance(event, WatchTransfersResponse) and event.header.event_seq == last_seq:
                return found
    raise AssertionError("the watch ended")


def seqs(events: list[WatchEvent]) -> list[int]:
    return [event.header.event_seq for event in events if isinstance(event, WatchTransfersResponse)]


def after(seq: int, incarnation: int = 7) -> ResponseHeader:
    return ResponseHeader(incarnation=incarnation, event_seq=seq)


# ---- nothing is repeated and nothing is lost


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5)), max_size=12),
    st.sampled_from([None, 1, 3]),
)
def test_a_cursor_reads_every_change_once(streams: list[tuple[int, int]], rarely: int | None) -> None:
    """Streams break after any number of messages while changes go on. Some servers send only matching changes, and
    otherwise just their position.
    """
    log = Log(seq=3)
    cursor = Cursor(TransferFilter(), 7, 3)
    found: list[int] = []
    for grows, reads in [*streams, (1, 1 << 30)]:
        log.seq += grows
        for number, message in enumerate(log.messages(cursor.request())[:reads]):
            if rarely and number and message.header.event_seq % rarely:
                message.ClearField("transfer")
            events = list(cursor.take(message, first=number == 0))
            assert not [event for event in events if not isinstance(event, WatchTransfersResponse)]
            found += seqs(events)
    assert found == [seq for seq in range(4, log.seq + 1) if seq % (rarely or 1) == 0]


def test_a_change_that_comes_twice_is_read_once() -> None:
    cursor = Cursor(TransferFilter(), 7, 3)
    messages = [stands(3), change(3), change(4), change(4), change(5), change(2)]
    assert seqs([e for n, m in enumerate(messages) for e in cursor.take(m, first=n == 0)]) == [4, 5]


def test_nothing_is_missed_after_the_number_zero_of_a_life() -> None:
    """A watch after number 0 starts with the present, so changes may be lost between a life's first streams."""
    cursor = Cursor(TransferFilter())
    assert list(cursor.take(stands(0), first=True)) == []
    assert list(cursor.take(stands(0), first=True)) == []
    (marker,) = cursor.take(stands(4), first=True)
    assert marker == HistoryLost(after(4))
    assert cursor.request().after_event_seq == 4


async def test_a_watch_resumes_after_the_last_change_of_the_same_life(server: FakeServer, client: Client) -> None:
    unavailable = (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    log = Log(seq=9, ends=[(1, *unavailable), (3, *unavailable), (4, grpc.StatusCode.OK, "")])
    server.answers["WatchTransfers"] = log.watch
    found = await read(client.watch(after=after(2), pace=BRISK, request_id="r"), 9)
    assert seqs(found) == [3, 4, 5, 6, 7, 8, 9]
    assert len(found) == 7
    assert [r.after_event_seq for r in log.requests] == [2, 2, 4, 7]
    assert {(r.incarnation, r.filter.request_id) for r in log.requests} == {(7, "r")}


async def test_a_watch_starts_with_the_present_and_keeps_it_over_a_break(server: FakeServer, client: Client) -> None:
    log = Log(seq=4, grows_by=1, ends=[(1, grpc.StatusCode.UNAVAILABLE, "")])
    server.answers["WatchTransfers"] = log.watch
    assert seqs(await read(client.watch(pace=BRISK), 6)) == [6]
    assert [(r.after_event_seq, r.incarnation) for r in log.requests] == [(0, 0), (5, 7)]


async def test_a_watch_survives_a_lost_connection(server: FakeServer) -> None:
    log = Log(seq=5)
    server.answers["WatchTransfers"] = log.watch
    async with connect(server.address) as client:
        events = client.watch(after=after(3), pace=Pace(pause_first_s=0.05, pause_max_s=0.2, give_up_s=UNTIL_S))
        async with asyncio.timeout(UNTIL_S):
            first = [await anext(events), await anext(events)]
            await server.stop()
            log.seq = 7
            rest = asyncio.ensure_future(read(events, 7))
            await asyncio.sleep(0)
            await server.start()
            assert seqs(first + await rest) == [4, 5, 6, 7]


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED])
async def test_a_watch_survives_what_no_server_of_kvgrpc_says(
    server: FakeServer, client: Client, code: grpc.StatusCode
) -> None:
    """A proxy that resets the stream, for example, causes these statuses."""
    log = Log(seq=9, ends=[(2, code, "")])
    server.answers["WatchTransfers"] = log.watch
    assert seqs(await read(client.watch(after=after(5), pace=BRISK), 9)) == [6, 7, 8, 9]


async def test_a_defect_of_the_server_is_raised(server: FakeServer, client: Client) -> None:
    who = {"engine_id": "P", "incarnation": "7"}
    server.answers["WatchTransfers"] = Refusing(grpc.StatusCode.INTERNAL, "INTERNAL", who).watch
    with pytest.raises(InternalError):
        await anext(client.watch(pace=BRISK))
    assert len(server.seen) == 1


async def test_a_slow_reader_that_the_server_drops_resumes(server: FakeServer, client: Client) -> None:
    log = Log(seq=9, ends=[(3, grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED")])
    server.answers["WatchTransfers"] = log.watch
    assert seqs(await read(client.watch(after=after(5), pace=BRISK), 9)) == [6, 7, 8, 9]


async def test_a_watch_after_a_reply_misses_no_change_of_the_transfer_in_it(server: FakeServer, client: Client) -> None:
    """This also holds where the reply's header is younger than the transfer."""
    log = Log(seq=9)
    server.answers["WatchTransfers"] = log.watch
    pull = PullBlocksResponse(header=after(6), transfer=Transfer(event_seq=4))
    assert seqs(await read(client.watch(after=pull, pace=BRISK), 9)) == [5, 6, 7, 8, 9]
    assert seqs(await read(client.watch(after=ListTransfersResponse(header=after(7)), pace=BRISK), 9)) == [8, 9]
    dry = PullBlocksResponse(header=after(8))  # the reply to a validate_only call
    assert seqs(await read(client.watch(after=dry, pace=BRISK), 9)) == [9]


# ---- the watch cannot know


async def test_a_marker_says_that_history_was_lost(server: FakeServer, client: Client) -> None:
    log = Log(seq=9, oldest=5, ends=[(1, grpc.StatusCode.UNAVAILABLE, "")], grows_by=1)
    server.answers["WatchTransfers"] = log.watch
    found = await read(client.watch(after=after(2), pace=BRISK), 11)
    assert found[0] == HistoryLost(after(10))
    assert seqs(found) == [11]


async def test_a_refusal_to_go_on_from_there_is_a_marker_too(server: FakeServer, client: Client) -> None:
    async def refuses(request: WatchTransfersRequest, context: Any) -> AsyncIterator[WatchTransfersResponse]:
        if request.after_event_seq:
            await fail(context, grpc.StatusCode.OUT_OF_RANGE, "HISTORY_LOST")
        yield stands(8)
        yield change(9)
        await asyncio.Event().wait()

    server.answers["WatchTransfers"] = refuses
    assert await read(client.watch(after=after(2), pace=BRISK), 9) == [HistoryLost(after(8)), change(9)]


async def test_a_marker_says_that_the_engine_started_over(server: FakeServer, client: Client) -> None:
    log = Log(seq=6)

    async def restarts(request: WatchTransfersRequest, context: Any) -> AsyncIterator[WatchTransfersResponse]:
        if request.incarnation == 7:
            log.incarnation, log.seq = 8, 2
            await fail(context, grpc.StatusCode.ABORTED, "INCARNATION_CHANGED")
        yield stands(2, 8)
        yield change(3, 8)
        await asyncio.Event().wait()

    server.answers["WatchTransfers"] = restarts
    found = await read(client.watch(after=after(5), pace=BRISK), 3)
    assert found[0] == IncarnationChanged(7, after(2, 8))
    assert seqs(found) == [3]


def test_a_new_life_in_the_first_message_is_enough() -> None:
    cursor = Cursor(TransferFilter(), 7, 5)
    assert list(cursor.take(stands(1, 8), first=True)) == [IncarnationChanged(7, after(1, 8))]
    assert (cursor.incarnation, cursor.seq) == (8, 1)
    marker, told = cursor.take(change(4, 9), first=True)
    assert isinstance(marker, IncarnationChanged)
    assert told == change(4, 9)


# ---- waiting for a server


async def test_every_stream_has_a_deadline_and_its_end_is_no_news(server: FakeServer, client: Client) -> None:
    log = Log(seq=1)
    server.answers["WatchTransfers"] = log.watch
    events = client.watch(after=after(1), pace=Pace(stream_s=0.1))
    waiting = asyncio.ensure_future(read(events, 2))
    async with asyncio.timeout(UNTIL_S):
        for _ in range(3):
            await log.arrivals.get()
        log.seq = 2
        found = await waiting
    assert found == [change(2)]
    assert all(seen.time_s is not None and seen.time_s < 10 for seen in server.seen)


async def test_an_error_that_does_not_pass_is_raised(server: FakeServer, client: Client) -> None:
    server.answers["WatchTransfers"] = Refusing(grpc.StatusCode.PERMISSION_DENIED, "NOT_OWNER").watch
    with pytest.raises(PermissionDenied):
        await anext(client.watch(pace=BRISK))
    assert len(server.seen) == 1


@dataclass
class Refusing:
    code: grpc.StatusCode
    reason: str = ""
    metadata: dict[str, str] = field(default_factory=dict)

    async def watch(self, request: Any, context: Any) -> AsyncIterator[WatchTransfersResponse]:
        await fail(context, self.code, self.reason, details=(retry_info(0.001),), metadata=self.metadata)
        yield stands(0)


async def test_a_server_that_stays_away_is_given_up(server: FakeServer, client: Client) -> None:
    server.answers["WatchTransfers"] = Refusing(grpc.StatusCode.UNAVAILABLE, "DRAINING").watch
    with pytest.raises(Unavailable) as raised:
        await anext(client.watch(pace=Pace(give_up_s=0.3, pause_first_s=0.05, pause_max_s=0.05)))
    assert raised.value.reason is Reason.DRAINING
    assert 2 <= len(server.seen) <= 13


async def test_a_server_that_never_answers_is_given_up_with_a_phase(server: FakeServer, client: Client) -> None:
    async def silent(request: Any, context: Any) -> AsyncIterator[WatchTransfersResponse]:
        await asyncio.Event().wait()
        yield stands(0)

    server.answers["WatchTransfers"] = silent
    with pytest.raises(DeadlineExceeded) as raised:
        await anext(client.watch(pace=Pace(give_up_s=0.02, stream_s=0.05, pause_first_s=0.001)))
    assert raised.value.metadata["phase"] == "watch"


async def test_streams_that_break_at_once_do_not_make_a_busy_loop(server: FakeServer, client: Client) -> None:
    """Each stream opens, so the watch is never given up, but the pauses between streams still grow."""
    log = Log(seq=1, ends=[(1, grpc.StatusCode.UNAVAILABLE, "")] * 1000)
    server.answers["WatchTransfers"] = log.watch
    pace = Pace(pause_first_s=0.02, pause_max_s=10.0)
    task = asyncio.ensure_future(anext(client.watch(after=after(1), pace=pace)))
    async with asyncio.timeout(UNTIL_S):
        first, *_, last = [await log.arrivals.get() for _ in range(6)]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert last - first >= (0.02 + 0.04 + 0.08 + 0.16 + 0.32) / 2  # jitter shortens a pause to half at most


@given(st.integers(1, 100), st.none() | st.floats(0, 60))
def test_pauses_grow_to_a_bound_and_follow_the_server(failures: int, asked_s: float | None) -> None:
    pace = Pace()
    pause_s = pace.pause_s(failures, asked_s)
    own = min(5.0, 0.1 * 2 ** (failures - 1))
    assert max(own / 2, asked_s or 0) <= pause_s <= max(own, asked_s or 0)


async def test_leaving_a_watch_ends_its_stream(server: FakeServer, client: Client) -> None:
    ended = asyncio.Event()

    async def long(request: Any, context: Any) -> AsyncIterator[WatchTransfersResponse]:
        try:
            yield stands(1)
            yield change(2)
            await asyncio.Event().wait()
        finally:
            ended.set()

    server.answers["WatchTransfers"] = long
    await read(client.watch(pace=BRISK), 2)
    async with asyncio.timeout(UNTIL_S):
        await ended.wait()
