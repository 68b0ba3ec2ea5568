"""SchedulerService for an engine's scheduler: tells the lead what happens to requests, and receives news.

    scheduler = client.scheduler()
    await scheduler.request_arrived("r1", token_ids, take=grant)
    found = await scheduler.match_tokens("r1", hit)
    await scheduler.blocks_allocated("r1", table, computed_tokens=hit, external_tokens=found.external_tokens)
    for news in await scheduler.poll(wait_s=1.0): ...

All calls of one step also fit into one message, made of the requests of `kvgrpc.client.step_calls`:

    reply = await scheduler.step([step_calls.match_tokens("r1", hit), ...])
    async with scheduler.steps() as step:  # over one stream, which costs less than a call for each
        reply = await step([...])

Every call may be repeated. The first reply names the life of the engine. In another life, every call is refused
(Aborted, INCARNATION_CHANGED) until `start_over`.
"""

from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack

from google.protobuf.message import Message
from grpc import aio

from kvgrpc.client import options as opt
from kvgrpc.client.calls import Caller, Options, checked_timeout
from kvgrpc.client.scheduler import step_calls
from kvgrpc.client.scheduler.step_calls import StepCall, in_step
from kvgrpc.client.scheduler.step_stream import StepStream
from kvgrpc.client.status import kind_of
from kvgrpc.client.values import AnyBlocks, Tokens, duration, reason_of
from kvgrpc.errors import KVGrpcError
from kvgrpc.v1 import scheduler_pb2 as pb
from kvgrpc.v1.common_pb2 import Grant

if TYPE_CHECKING:
    from kvgrpc.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


class Step(Protocol):
    """Makes one step: sends all its calls in order, and returns their answers and the news."""

    def __call__(
        self, calls: Iterable[StepCall] = (), *, timeout_s: float | None = None
    ) -> Coroutine[Any, Any, pb.ScheduleResponse]: ...


class Scheduler:
    """The calls of one engine's scheduler. An engine has one scheduler; `Client.scheduler` makes this."""

    def __init__(self, caller: Caller, stub: "SchedulerServiceAsyncStub") -> None:
        self.incarnation = 0
        """Life of the engine that the requests and blocks belong to; 0 before the first reply."""
        self._call = caller
        self._stub = stub
        self._seq = 0

    def start_over(self) -> None:
        """Starts over in the engine's new life, which knows no request. Blocks kept for the last life are gone."""
        self.incarnation = self._seq = 0

    # ---- hooks

    async def request_arrived(
        self,
        request_id: str,
        prompt: Tokens | None = None,
        *,
        take: Grant | pb.PushOffer | None = None,
        give: pb.KvGift | None = None,
        **options: Unpack[opt.Arrival],
    ) -> pb.RequestArrivedResponse:
        """Reports a new request. `take`: KV that it pulls, or that is pushed to it. `give`: others will want its KV."""
        request = step_calls.request_arrived(request_id, prompt, take=take, give=give, **options)
        return await self._ask(self._stub.RequestArrived, request, options)

    async def match_tokens(
        self, request_id: str, computed_tokens: int = 0, **options: Unpack[opt.Call]
    ) -> pb.MatchTokensResponse:
        """Returns how many tokens beyond those computed here can come from elsewhere. Changes nothing."""
        return await self._ask(self._stub.MatchTokens, step_calls.match_tokens(request_id, computed_tokens), options)

    async def blocks_allocated(
        self, request_id: str, blocks: AnyBlocks, **options: Unpack[opt.Allocated]
    ) -> pb.BlocksAllocatedResponse:
        """Reports all blocks of a request. The missing tokens begin to move, or the source is released."""
        request = step_calls.blocks_allocated(request_id, blocks, **options)
        return await self._ask(self._stub.BlocksAllocated, request, options)

    async def tokens_computed(
        self, request_id: str, blocks: AnyBlocks, computed_tokens: int, **options: Unpack[opt.Computed]
    ) -> pb.TokensComputedResponse:
        """Reports a scheduled step, after which `computed_tokens` tokens have KV."""
        request = step_calls.tokens_computed(request_id, blocks, computed_tokens, **options)
        return await self._ask(self._stub.TokensComputed, request, options)

    async def blocks_loaded(self, request_id: str, **options: Unpack[opt.Call]) -> pb.BlocksLoadedResponse:
        """Reports that a staged engine has copied what arrived."""
        return await self._ask(self._stub.BlocksLoaded, step_calls.blocks_loaded(request_id), options)

    async def request_preempted(self, request_id: str, **options: Unpack[opt.Call]) -> pb.RequestPreemptedResponse:
        """Reports a preemption. The request's blocks may be reused when this returns."""
        return await self._ask(self._stub.RequestPreempted, step_calls.request_preempted(request_id), options)

    async def request_finished(
        self,
        request_id: str,
        blocks: AnyBlocks,
        computed_tokens: int,
        outcome: pb.RequestOutcome.ValueType = pb.REQUEST_OUTCOME_COMPLETE,
        *,
        content: Tokens | None = None,
        **options: Unpack[opt.Computed],
    ) -> pb.RequestFinishedResponse:
        """Reports the end of a request. The reply says whether to keep its blocks, and holds the grant for the next
        engine. `content` has the tokens of prompt and answer, for an engine that decodes and gives.
        """
        request = step_calls.request_finished(request_id, blocks, computed_tokens, outcome, content=content, **options)
        return await self._ask(self._stub.RequestFinished, request, options)

    async def abort_request(
        self, request_id: str, message: str = "", **options: Unpack[opt.Call]
    ) -> pb.AbortRequestResponse:
        """Reports that the request is no longer wanted, in any state."""
        return await self._ask(self._stub.AbortRequest, step_calls.abort_request(request_id, message), options)

    async def blocks_needed(
        self,
        counts: int | Mapping[int, int],
        *,
        request_time_us: int = 0,
        request_id: str = "",
        **options: Unpack[opt.Call],
    ) -> pb.BlocksNeededResponse:
        """Asks for blocks that the scheduler lacks: a count of the only group, or {group: count}. Blocks of unclaimed
        hand-overs come back, all or none. `request_time_us` and `request_id` name the oldest request that waits for
        blocks; with them, hand-overs also yield if their readers are younger and wait for blocks of their own.
        """
        request = step_calls.blocks_needed(counts, request_time_us=request_time_us, request_id=request_id)
        return await self._ask(self._stub.BlocksNeeded, request, options)

    # ---- news, and steps

    async def poll(self, wait_s: float = 0.0, **options: Unpack[opt.Call]) -> Sequence[pb.SchedulerNews]:
        """Returns the news, after waiting up to `wait_s` (at most 60 s) for the first. The next `poll` or `step`
        acknowledges them, so a failed call loses nothing.
        """
        request = pb.PollSchedulerNewsRequest(after_seq=self._seq, wait=duration(wait_s))
        reply = await self._ask(
            self._stub.PollSchedulerNews, request, {"timeout_s": wait_s + self._call.timeout_s, **options}
        )
        self._told(reply.news)
        return reply.news

    async def step(self, calls: Iterable[StepCall] = (), **options: Unpack[opt.Call]) -> pb.ScheduleStepResponse:
        """Sends all calls of one step in order, in one message, and returns the answers and the news. A refused call
        says so in its answer: see `refusal`.
        """
        request = pb.ScheduleStepRequest(calls=self._calls(calls), after_seq=self._seq)
        reply = await self._ask(self._stub.ScheduleStep, request, options)
        self._told(reply.news)
        return reply

    @asynccontextmanager
    async def steps(self) -> AsyncGenerator["Step", None]:
        """Yields a function that makes steps like `step`, one at a time, over one stream. A failed step ends the
        stream, and the next one opens another.
        """
        stream = StepStream(self._call, self._stub)

        async def step(calls: Iterable[StepCall] = (), *, timeout_s: float | None = None) -> pb.ScheduleResponse:
            request = pb.ScheduleRequest(calls=self._calls(calls), after_seq=self._seq, incarnation=self.incarnation)
            reply = await stream.ask(request, checked_timeout(self._call.timeout_s if timeout_s is None else timeout_s))
            self.incarnation = self.incarnation or reply.header.incarnation
            self._told(reply.news)
            return reply

        try:
            yield step
        finally:
            stream.close()

    async def _ask(
        self, method: "aio.UnaryUnaryMultiCallable[Request, Response]", request: Request, options: Options
    ) -> Response:
        asked: Any = request
        if "incarnation" in request.DESCRIPTOR.fields_by_name and not asked.incarnation:
            asked.incarnation = self.incarnation
        self._of_this_life(request)
        others = {name: value for name, value in options.items() if name != "incarnation"}
        reply: Any = await self._call.read(method, request, others)
        self.incarnation = self.incarnation or reply.header.incarnation
        return reply  # type: ignore[no-any-return]

    def _calls(self, calls: Iterable[StepCall]) -> Iterator[pb.ScheduleCall]:
        for call in calls:
            made = in_step(call)
            self._of_this_life(getattr(made, made.WhichOneof("call") or ""))
            yield made

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
