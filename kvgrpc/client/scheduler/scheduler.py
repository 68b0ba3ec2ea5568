"""SchedulerService for an engine's scheduler: tells the lead what happens to requests, and receives news.

    scheduler = client.scheduler()
    await scheduler.request_arrived("r1", token_ids, take=grant)
    found = await scheduler.match_tokens("r1", hit)
    await scheduler.blocks_allocated("r1", table, computed_tokens=hit, external_tokens=found.external_tokens)
    for news in await scheduler.poll(wait_s=1.0): ...

All calls of one step also fit into one message, made of the requests of `kvgrpc.client.step_calls`. Steps go over one
stream, and cost less than their calls:

    reply = await scheduler.step([step_calls.match_tokens("r1", hit), ...])

Every call may be repeated. The first reply names the life of the engine. In another life, every call is refused
(Aborted, INCARNATION_CHANGED) until `start_over`.
"""

import functools
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, Unpack

from google.protobuf.message import Message
from grpc import aio

from kvgrpc.client import options as opt
from kvgrpc.client.caller import Caller, Options, checked_timeout, traceparent_of
from kvgrpc.client.grpc_status import kind_of
from kvgrpc.client.scheduler import step_calls
from kvgrpc.client.scheduler.step_calls import StepCall, in_step
from kvgrpc.client.scheduler.step_stream import StepStream
from kvgrpc.client.values import call_options, duration, reason_of
from kvgrpc.errors import KVGrpcError
from kvgrpc.v1 import scheduler_pb2 as pb

if TYPE_CHECKING:
    from kvgrpc.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

P = ParamSpec("P")
Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


def _alone(
    rpc: Callable[["SchedulerServiceAsyncStub"], "aio.UnaryUnaryMultiCallable[Request, Response]"],
    build: Callable[P, Request],
) -> Callable[Concatenate["Scheduler", P], Coroutine[Any, Any, Response]]:
    """Makes a method that sends the request of a builder by itself, with the builder's arguments."""

    @functools.wraps(build)
    async def call(self: "Scheduler", /, *args: P.args, **kwargs: P.kwargs) -> Response:
        return await self._ask(rpc(self._stub), build(*args, **kwargs), call_options(kwargs))

    return call


class Scheduler:
    """The calls of one engine's scheduler. An engine has one scheduler; `Client.scheduler` makes this."""

    def __init__(self, caller: Caller, stub: "SchedulerServiceAsyncStub") -> None:
        self.incarnation = 0
        """Life of the engine that the requests and blocks belong to; 0 before the first reply."""
        self._call = caller
        self._stub = stub
        self._steps = StepStream(caller, stub)
        self._seq = 0

    def start_over(self) -> None:
        """Starts over in the engine's new life, which knows no request. Blocks kept for the last life are gone."""
        self.incarnation = self._seq = 0

    # ---- hooks

    request_arrived = _alone(lambda stub: stub.RequestArrived, step_calls.request_arrived)
    match_tokens = _alone(lambda stub: stub.MatchTokens, step_calls.match_tokens)
    blocks_allocated = _alone(lambda stub: stub.BlocksAllocated, step_calls.blocks_allocated)
    tokens_computed = _alone(lambda stub: stub.TokensComputed, step_calls.tokens_computed)
    blocks_loaded = _alone(lambda stub: stub.BlocksLoaded, step_calls.blocks_loaded)
    request_preempted = _alone(lambda stub: stub.RequestPreempted, step_calls.request_preempted)
    request_finished = _alone(lambda stub: stub.RequestFinished, step_calls.request_finished)
    abort_request = _alone(lambda stub: stub.AbortRequest, step_calls.abort_request)
    blocks_needed = _alone(lambda stub: stub.BlocksNeeded, step_calls.blocks_needed)

    # ---- news, and steps

    async def poll(self, wait_s: float = 0.0, **options: Unpack[opt.CallOptions]) -> Sequence[pb.SchedulerNews]:
        """Returns the news, after waiting up to `wait_s` (at most 60 s) for the first. The next `poll` or `step`
        acknowledges them, so a failed call loses nothing.
        """
        request = pb.PollSchedulerNewsRequest(after_seq=self._seq, wait=duration(wait_s))
        reply = await self._ask(
            self._stub.PollSchedulerNews, request, {"timeout_s": wait_s + self._call.timeout_s, **options}
        )
        self._told(reply.news)
        return reply.news

    async def step(self, calls: Iterable[StepCall] = (), *, timeout_s: float | None = None) -> pb.ScheduleResponse:
        """Sends all calls of one step in order, in one message, and returns the answers and the news. A refused call
        says so in its answer: see `refusal`. One step is under way at a time. The stream opens with the first step,
        again after it was lost, and ends with the client.
        """
        made = [self._in_step(call) for call in calls]
        reply = await self._steps.ask(
            lambda: pb.ScheduleRequest(calls=made, after_seq=self._seq, incarnation=self.incarnation),
            checked_timeout(self._call.timeout_s if timeout_s is None else timeout_s),
        )
        self.incarnation = self.incarnation or reply.header.incarnation
        self._told(reply.news)
        return reply

    async def _ask(
        self, method: "aio.UnaryUnaryMultiCallable[Request, Response]", request: Request, options: Options
    ) -> Response:
        asked: Any = request
        if "incarnation" in request.DESCRIPTOR.fields_by_name and not asked.incarnation:
            asked.incarnation = self.incarnation
        self._of_this_life(request)
        reply: Any = await self._call.read(method, request, options)
        self.incarnation = self.incarnation or reply.header.incarnation
        return reply  # type: ignore[no-any-return]

    def _in_step(self, call: StepCall) -> pb.ScheduleCall:
        made = in_step(call)
        self._of_this_life(getattr(made, made.WhichOneof("call") or ""))
        if made.HasField("request_arrived") and not made.request_arrived.traceparent:
            made.request_arrived.traceparent = traceparent_of(self._call.headers())
        return made

    def _of_this_life(self, request: Message) -> None:
        """Marks bare block ids as ids of the life that this scheduler knows."""
        asked: Any = request
        if "blocks" in request.DESCRIPTOR.fields_by_name and not asked.blocks.incarnation:
            asked.blocks.incarnation = self.incarnation

    def _told(self, news: Sequence[pb.SchedulerNews]) -> None:
        self._seq = news[-1].seq if news else self._seq


def refusal(answer: pb.ScheduleAnswer) -> KVGrpcError | None:
    """Returns the error that the call would have raised alone, or None if it was not refused."""
    if not answer.HasField("failure"):
        return None
    return kind_of(answer.status_code)(reason_of(answer.failure.reason), answer.failure.message)
