"""Tenants whose schedulers share one server with a pool of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio

from kvgrpc.errors import AlreadyExists, KVGrpcError, PermissionDenied
from kvgrpc.service.grpc_status import from_rpc_error
from kvgrpc.v1 import scheduler_pb2 as v1
from kvgrpc.v1.scheduler_pb2_grpc import SchedulerServiceStub
from tests.identity.servers import People, serving
from tests.service.scheduler.schedulers import arrived, intent
from tests.service.values import dur

TAKEN = "r"


async def told(stub: Any, after_seq: int = 0, wait_s: float = 0.0) -> list[v1.SchedulerNews]:
    request = v1.PollSchedulerNewsRequest(after_seq=after_seq, wait=dur(wait_s))
    return list((await stub.PollSchedulerNews(request)).news)


async def answer(call: Callable[[Any], Any], request: Any) -> tuple[type, str]:
    """Returns the answer to a call, or its refusal, as text that can be compared."""
    try:
        reply = await call(request)
    except grpc.aio.AioRpcError as error:
        return type(from_rpc_error(error)), from_rpc_error(error).message
    reply.ClearField("header")
    return type(reply), str(reply)


async def refused(call: Callable[[Any], Any], request: Any) -> type:
    kind, _ = await answer(call, request)
    assert issubclass(kind, KVGrpcError)
    return kind


async def test_the_news_of_one_tenants_requests_are_neither_told_nor_lost_to_another(tmp_path: Path) -> None:
    people = People(tmp_path)
    people.give(p="peer", red="engine@red", blue="engine@blue")
    async with (
        serving(people, "p") as p, people.channel(p, "red") as first, people.channel(p, "blue") as second,
    ):  # fmt: skip
        red, blue = SchedulerServiceStub(first), SchedulerServiceStub(second)
        await red.RequestArrived(arrived(TAKEN, None, push=v1.PushOffer(), intent=intent()))
        (lost,) = await told(red)
        assert lost.request_id == TAKEN
        assert not await told(blue)
        assert not await told(blue, after_seq=lost.seq)
        async for step in blue.Schedule(iter([v1.ScheduleRequest(after_seq=lost.seq)])):
            assert not step.news
        assert await told(red) == [lost]
        assert not await told(red, after_seq=lost.seq)


async def test_a_request_of_another_tenant_is_answered_as_an_unknown_one(tmp_path: Path) -> None:
    people = People(tmp_path)
    people.give(p="peer", red="engine@red", red2="engine@red", blue="engine@blue")
    async with (
        serving(people, "p") as p, people.channel(p, "red") as first, people.channel(p, "blue") as second,
        people.channel(p, "red2") as third,
    ):  # fmt: skip
        red, blue, red2 = map(SchedulerServiceStub, (first, second, third))
        given = arrived(TAKEN, give=v1.KvGift(), intent=intent())
        await red.RequestArrived(given)
        calls: dict[Callable[[Any], Any], Any] = {
            blue.MatchTokens: v1.MatchTokensRequest,
            blue.BlocksAllocated: v1.BlocksAllocatedRequest,
            blue.TokensComputed: v1.TokensComputedRequest,
            blue.BlocksLoaded: v1.BlocksLoadedRequest,
            blue.RequestPreempted: v1.RequestPreemptedRequest,
            blue.AbortRequest: v1.AbortRequestRequest,
            blue.RequestFinished: v1.RequestFinishedRequest,
            blue.BlocksNeeded: v1.BlocksNeededRequest,
        }
        for call, kind in calls.items():
            assert await answer(call, kind(request_id=TAKEN)) == await answer(call, kind(request_id="unknown"))
        assert await refused(blue.RequestArrived, given) is AlreadyExists
        assert await refused(red2.AbortRequest, v1.AbortRequestRequest(request_id=TAKEN)) is PermissionDenied
        other = arrived(TAKEN, intent=intent())
        assert await refused(red.RequestArrived, other) is AlreadyExists, "its request is still there"
