"""A scheduler's steps over one stream: deadlines, lost streams, refusals, and what each step acknowledges."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from kvgrpc.client import Client, connect, step_calls
from kvgrpc.client.scheduler import step_stream
from kvgrpc.client.scheduler.step_stream import ATTEMPTS
from kvgrpc.errors import Aborted, DeadlineExceeded, Unavailable
from kvgrpc.v1.scheduler_pb2 import ScheduleAnswer, ScheduleRequest, ScheduleResponse
from tests.client.fake import FakeServer
from tests.client.streams.stepping import LIFE, SAID, R, answering, failing_stream, news_from


async def test_steps_acknowledge_what_was_heard_over_one_stream(server: FakeServer, client: Client) -> None:
    server.answers["Schedule"] = answering(*news_from(1, 2))
    scheduler = client.scheduler()
    reply = await scheduler.step([step_calls.match_tokens(R, 16), step_calls.abort_request(R)])
    assert [row.seq for row in reply.news] == [1, 2]
    await scheduler.step()
    assert [call.WhichOneof("call") for call in SAID[0].calls] == ["match_tokens", "abort_request"]
    assert [(said.after_seq, said.incarnation) for said in SAID] == [(0, 0), (2, 7)]
    assert len(server.requests("Schedule")) == 1, "one stream for both"
    await scheduler.poll()
    assert (server.seen[-1].request.after_seq, server.seen[-1].request.incarnation) == (2, 7)


async def test_steps_of_several_tasks_go_one_after_the_other(server: FakeServer, client: Client) -> None:
    server.answers["Schedule"] = answering(*news_from(1, 2))
    scheduler = client.scheduler()
    await asyncio.gather(*(scheduler.step() for _ in range(3)))
    assert [said.after_seq for said in SAID] == [0, 2, 2], "each acknowledges what those before it were told"
    assert len(server.requests("Schedule")) == 1


async def test_a_step_whose_stream_is_lost_goes_over_another(server: FakeServer, client: Client) -> None:
    server.answers["Schedule"] = answering(steps_a_stream=1)
    scheduler = client.scheduler()
    for count in range(1, 4):
        assert (await scheduler.step([step_calls.match_tokens(R, count)])).header == LIFE
    assert {said.calls[0].match_tokens.computed_tokens for said in SAID} == {1, 2, 3}
    await server.stop()
    await server.start()
    server.answers["Schedule"] = answering()
    assert (await scheduler.step()).header == LIFE


async def test_a_refused_step_is_repeated_only_if_it_may_be(server: FakeServer, client: Client) -> None:
    scheduler = client.scheduler()
    for code, reason, error, times in (
        (grpc.StatusCode.UNAVAILABLE, "NO_POOL", Unavailable, ATTEMPTS),
        (grpc.StatusCode.ABORTED, "INCARNATION_CHANGED", Aborted, 1),
    ):
        server.seen.clear()
        server.answers["Schedule"] = failing_stream(code, reason)
        with pytest.raises(error) as caught:
            await scheduler.step()
        assert caught.value.reason.name == reason
        assert len(server.requests("Schedule")) == times
    server.answers["Schedule"] = answering()
    assert (await scheduler.step()).header == LIFE


async def test_a_stream_that_would_end_within_a_step_is_not_used(
    server: FakeServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_stream, "STREAM_S", 1.0)
    server.answers["Schedule"] = answering()
    scheduler = client.scheduler()
    await scheduler.step(timeout_s=2.0)
    await scheduler.step(timeout_s=2.0)
    await scheduler.step(timeout_s=30.0)
    first, second = (seen.time_s or 0.0 for seen in server.seen)
    assert first < 3.1
    assert 30.0 < second < 31.5


async def test_the_trace_of_a_step_is_that_of_the_requests_that_arrive_in_it(
    server: FakeServer, client: Client
) -> None:
    server.answers["Schedule"] = answering()
    scheduler = client.scheduler()
    parents = [f"00-{number:032x}-{number:016x}-01" for number in (1, 2)]
    for number, parent in enumerate(parents, 1):
        context = SpanContext(number, number, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
        with trace.use_span(NonRecordingSpan(context)):
            await scheduler.step([step_calls.request_arrived(R), step_calls.request_arrived(R, traceparent="mine")])
        assert [call.request_arrived.traceparent for call in SAID[-1].calls] == [parent, "mine"]
    await scheduler.step([step_calls.request_arrived(R)])
    assert not SAID[-1].calls[0].request_arrived.traceparent
    assert "traceparent" not in server.seen[0].metadata, "one stream is for requests of all traces"


async def test_a_step_that_meets_the_end_of_its_stream_is_answered(server: FakeServer, client: Client) -> None:
    """Varies how much gRPC knows of the stream's end when the step is written."""
    for turns in range(20):
        end = asyncio.Event()

        async def one(
            steps: AsyncIterator[ScheduleRequest], _: Any, end: asyncio.Event = end
        ) -> AsyncIterator[ScheduleResponse]:
            async for _step in steps:
                yield ScheduleResponse(header=LIFE)
                await end.wait()
                return

        server.answers["Schedule"] = one
        scheduler = client.scheduler()
        await scheduler.step()
        end.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        time.sleep(0.02)  # noqa: ASYNC251 - gRPC's threads go on while this one learns nothing of it
        assert (await scheduler.step()).header == LIFE


async def test_a_late_answer_is_not_the_answer_to_the_next_step(server: FakeServer, client: Client) -> None:
    go_on = asyncio.Event()

    async def late(steps: AsyncIterator[ScheduleRequest], _: Any) -> AsyncIterator[ScheduleResponse]:
        async for step in steps:
            if len(step.calls) == 1:
                await go_on.wait()
            yield ScheduleResponse(answers=[ScheduleAnswer(status_code=len(step.calls))])

    server.answers["Schedule"] = late
    scheduler = client.scheduler()
    with pytest.raises(DeadlineExceeded) as caught:
        await scheduler.step([step_calls.match_tokens(R)], timeout_s=0.2)
    assert caught.value.metadata["phase"] == "step"
    cancelled = asyncio.create_task(scheduler.step([step_calls.match_tokens(R)]))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    go_on.set()
    assert (await scheduler.step()).answers[0].status_code == 0
    with pytest.raises(ValueError, match="every call has a deadline"):
        await scheduler.step(timeout_s=0)


async def test_a_client_that_is_closed_ends_its_stream_of_steps(server: FakeServer) -> None:
    ended = asyncio.Event()

    async def answers(steps: AsyncIterator[ScheduleRequest], _: Any) -> AsyncIterator[ScheduleResponse]:
        try:
            async for _step in steps:
                yield ScheduleResponse(header=LIFE)
        finally:
            ended.set()

    server.answers["Schedule"] = answers
    async with connect(server.address) as client:
        await client.scheduler().step()
    async with asyncio.timeout(5.0):
        await ended.wait()
