"""Answers of a fake server to the steps of a scheduler."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvgrpc.v1.common_pb2 import ResponseHeader
from kvgrpc.v1.scheduler_pb2 import ScheduleRequest, ScheduleResponse, SchedulerNews
from tests.client.fake import fail

R = "r1"
LIFE = ResponseHeader(incarnation=7)


def news_from(first: int, count: int) -> list[SchedulerNews]:
    return [SchedulerNews(seq=first + i, request_id=R) for i in range(count)]


def answering(*news: SchedulerNews, steps_a_stream: int = 1 << 30) -> Any:
    """Answers every step with the same news, and ends a stream after so many steps."""

    async def answers(steps: AsyncIterator[ScheduleRequest], _: Any) -> AsyncIterator[ScheduleResponse]:
        here = 0
        async for step in steps:
            SAID.append(step)
            yield ScheduleResponse(header=LIFE, news=news)
            if (here := here + 1) == steps_a_stream:
                return

    SAID.clear()
    return answers


SAID: list[ScheduleRequest] = []
"""Steps that the server received over streams."""


def failing_stream(code: grpc.StatusCode, reason: str, **how: Any) -> Any:
    """Refuses every stream."""

    async def answers(_: Any, context: Any) -> AsyncIterator[ScheduleResponse]:
        await fail(context, code, reason, **how)
        yield ScheduleResponse()

    return answers
