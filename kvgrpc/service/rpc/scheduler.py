"""SchedulerService: the policy for schedulers in any language."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvgrpc.core.values.owners import Verb
from kvgrpc.errors import InternalError, InvalidRequest, KVGrpcError, Reason, note
from kvgrpc.service.callers import PRINCIPAL
from kvgrpc.service.lead import Lead
from kvgrpc.service.rpc.method import streaming, unary
from kvgrpc.service.runner import wall_us
from kvgrpc.service.scheduler.hooks import Scheduling
from kvgrpc.service.session.calls import refusal
from kvgrpc.service.status import status_code
from kvgrpc.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from kvgrpc.wire import answers, scheduler as wire
from kvgrpc.wire.bounds import check_count
from kvgrpc.wire.fields import Budget
from kvgrpc.wire.requests import block_counts
from kvgrpc.wire.values import grant, lists_of, seconds

_log = logging.getLogger(__name__)
STEP_CALLS_MAX = 1_024
"""Maximum number of calls in a step: the answer to a step is one message."""
TURN_S = 0.02
"""Time to handle a step's calls before others have their turn, in seconds: far longer than a scheduler's step takes."""

_Request = TypeVar("_Request", bound=Message)
_Reply = TypeVar("_Reply", bound=Message)
_Step = scheduler_pb2.ScheduleStepRequest | scheduler_pb2.ScheduleRequest
_Stepped = scheduler_pb2.ScheduleStepResponse | scheduler_pb2.ScheduleResponse


class SchedulerService(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Converts a request, asks the policy, and converts its answer."""

    def __init__(self, lead: Lead) -> None:
        self._lead = lead
        self._scheduling = Scheduling(lead)
        self._answers: dict[str, Callable[[Any, str], Message]] = {
            "request_arrived": self._arrived,
            "match_tokens": self._match,
            "blocks_allocated": self._allocated,
            "tokens_computed": self._computed,
            "blocks_loaded": self._loaded,
            "request_preempted": self._preempted,
            "request_finished": self._finished,
            "abort_request": self._aborted,
            "blocks_needed": self._needed,
        }

    # -- the RPCs

    @unary
    async def RequestArrived(
        self, request: scheduler_pb2.RequestArrivedRequest, trace: str
    ) -> scheduler_pb2.RequestArrivedResponse:
        return self._one(self._arrived, request, trace)

    @unary
    async def MatchTokens(
        self, request: scheduler_pb2.MatchTokensRequest, trace: str
    ) -> scheduler_pb2.MatchTokensResponse:
        return self._one(self._match, request, trace)

    @unary
    async def BlocksAllocated(
        self, request: scheduler_pb2.BlocksAllocatedRequest, trace: str
    ) -> scheduler_pb2.BlocksAllocatedResponse:
        return self._one(self._allocated, request, trace)

    @unary
    async def TokensComputed(
        self, request: scheduler_pb2.TokensComputedRequest, trace: str
    ) -> scheduler_pb2.TokensComputedResponse:
        return self._one(self._computed, request, trace)

    @unary
    async def BlocksLoaded(
        self, request: scheduler_pb2.BlocksLoadedRequest, trace: str
    ) -> scheduler_pb2.BlocksLoadedResponse:
        return self._one(self._loaded, request, trace)

    @unary
    async def RequestPreempted(
        self, request: scheduler_pb2.RequestPreemptedRequest, trace: str
    ) -> scheduler_pb2.RequestPreemptedResponse:
        return self._one(self._preempted, request, trace)

    @unary
    async def RequestFinished(
        self, request: scheduler_pb2.RequestFinishedRequest, trace: str
    ) -> scheduler_pb2.RequestFinishedResponse:
        return self._one(self._finished, request, trace)

    @unary
    async def AbortRequest(
        self, request: scheduler_pb2.AbortRequestRequest, trace: str
    ) -> scheduler_pb2.AbortRequestResponse:
        return self._one(self._aborted, request, trace)

    @unary
    async def BlocksNeeded(
        self, request: scheduler_pb2.BlocksNeededRequest, trace: str
    ) -> scheduler_pb2.BlocksNeededResponse:
        return self._one(self._needed, request, trace)

    @unary
    async def PollSchedulerNews(
        self, request: scheduler_pb2.PollSchedulerNewsRequest, trace: str
    ) -> scheduler_pb2.PollSchedulerNewsResponse:
        lead, news = self._lead, self._scheduling.news
        self._check_caller()
        lead.node.state.check_life(request.incarnation)
        news.acknowledge(request.after_seq)
        self._scheduling.hear()
        await news.wait(min(seconds(request, "wait") or 0.0, lead.config.limits.wait_s))
        reply = scheduler_pb2.PollSchedulerNewsResponse(header=lead.header())
        wire.put_news(news.unread(), reply, lead.node.state.incarnation)
        return reply

    @unary
    async def ScheduleStep(
        self, request: scheduler_pb2.ScheduleStepRequest, trace: str
    ) -> scheduler_pb2.ScheduleStepResponse:
        reply = scheduler_pb2.ScheduleStepResponse()
        await self._step(request, reply, trace)
        return reply

    @streaming
    async def Schedule(
        self, request: AsyncIterator[scheduler_pb2.ScheduleRequest], trace: str
    ) -> AsyncIterator[scheduler_pb2.ScheduleResponse]:
        async for step in request:
            reply = scheduler_pb2.ScheduleResponse()
            await self._step(step, reply, trace)
            yield reply
            del step, reply  # frees them now: the next step may come much later

    # -- steps

    async def _step(self, request: _Step, reply: _Stepped, trace: str) -> None:
        """Handles all calls and adds the news. Serves others between long calls. Raises only before the first call."""
        self._check_caller()
        check_count("calls", len(request.calls), STEP_CALLS_MAX)
        self._lead.node.state.check_life(request.incarnation)
        news = self._scheduling.news
        news.acknowledge(request.after_seq)
        self._scheduling.hear()
        budget, began = Budget(), time.monotonic()
        for call in request.calls:
            self._answer(call, budget, reply.answers.add(), trace)
            if time.monotonic() - began > TURN_S:
                await asyncio.sleep(0)
                began = time.monotonic()
        wire.put_news(news.unread(), reply, self._lead.node.state.incarnation)
        reply.header.CopyFrom(self._lead.header())

    def _answer(
        self, call: scheduler_pb2.ScheduleCall, budget: Budget, into: scheduler_pb2.ScheduleAnswer, trace: str
    ) -> None:
        kind = call.WhichOneof("call")
        try:
            budget.take(call)
            if kind is None:
                raise InvalidRequest(Reason.INVALID_FIELD, "a call is one that this server knows")
            made = self._own(self._answers[kind], getattr(call, kind), trace)
            getattr(into, kind).CopyFrom(made)
            getattr(into, kind).SetInParent()
        except KVGrpcError as error:
            _refuse(into, error)
        except Exception as error:  # noqa: BLE001 - a defect of ours must not fail later calls
            _log.exception("%s failed", kind)
            _refuse(into, InternalError(Reason.INTERNAL, f"a defect of kvgrpc: {error!r}"))

    # -- the calls

    def _check_caller(self) -> None:
        """Raises PermissionDenied (NOT_OWNER) for a caller that does not schedule for this pool."""
        self._lead.node.state.check_pool(PRINCIPAL.get(), Verb.SCHEDULE)

    def _own(self, answer: Callable[[_Request, str], _Reply], request: _Request, trace: str) -> _Reply:
        """Answers a call about the caller's own request. Raises PermissionDenied (NOT_OWNER) for another one."""
        self._scheduling.check_owner(getattr(request, "request_id", ""))
        return answer(request, trace)

    def _one(self, answer: Callable[[_Request, str], _Reply], request: _Request, trace: str) -> _Reply:
        """Answers a call outside a step, with the header of this moment."""
        self._check_caller()
        reply = self._own(answer, request, trace)
        header: common_pb2.ResponseHeader = reply.header  # type: ignore[attr-defined]
        header.CopyFrom(self._lead.header())
        return reply

    def _arrived(
        self, request: scheduler_pb2.RequestArrivedRequest, trace: str
    ) -> scheduler_pb2.RequestArrivedResponse:
        self._lead.node.state.check_life(request.incarnation)
        admitted = self._scheduling.arrived(wire.arrived(request, self._lead.weights, trace, wall_us()))
        return scheduler_pb2.RequestArrivedResponse(prompt_tokens=admitted.prompt_tokens, one_token=admitted.one_token)

    def _match(self, request: scheduler_pb2.MatchTokensRequest, _: str) -> scheduler_pb2.MatchTokensResponse:
        self._scheduling.hear(wire.required_id(request.request_id))
        found = self._scheduling.match(request.request_id, request.computed_tokens)
        return scheduler_pb2.MatchTokensResponse(external_tokens=found.tokens)

    def _allocated(
        self, request: scheduler_pb2.BlocksAllocatedRequest, _: str
    ) -> scheduler_pb2.BlocksAllocatedResponse:
        table = self._table(request)
        self._scheduling.allocated(
            request.request_id, table, request.computed_tokens, request.external_tokens, request.after_step
        )
        return scheduler_pb2.BlocksAllocatedResponse()

    def _computed(self, request: scheduler_pb2.TokensComputedRequest, _: str) -> scheduler_pb2.TokensComputedResponse:
        table = self._table(request)
        self._scheduling.computed(request.request_id, table, request.computed_tokens, request.step)
        return scheduler_pb2.TokensComputedResponse()

    def _loaded(self, request: scheduler_pb2.BlocksLoadedRequest, _: str) -> scheduler_pb2.BlocksLoadedResponse:
        self._scheduling.hear(wire.required_id(request.request_id))
        self._scheduling.loaded(request.request_id)
        return scheduler_pb2.BlocksLoadedResponse()

    def _preempted(
        self, request: scheduler_pb2.RequestPreemptedRequest, _: str
    ) -> scheduler_pb2.RequestPreemptedResponse:
        self._scheduling.hear(wire.required_id(request.request_id))
        self._scheduling.preempted(request.request_id)
        return scheduler_pb2.RequestPreemptedResponse()

    def _finished(self, request: scheduler_pb2.RequestFinishedRequest, _: str) -> scheduler_pb2.RequestFinishedResponse:
        table, outcome = self._table(request), wire.outcome(request.outcome)
        names = wire.named(request.content, self._lead.weights)
        finished, token = self._scheduling.finished(
            request.request_id, names, table, request.computed_tokens, outcome, request.step
        )
        return scheduler_pb2.RequestFinishedResponse(
            keep=finished.keep,
            handed_over=finished.handed_over,
            grant=grant(token) if token else None,
            kv_transfer_params=wire.kv_transfer_params(token),
        )

    def _aborted(self, request: scheduler_pb2.AbortRequestRequest, _: str) -> scheduler_pb2.AbortRequestResponse:
        finished = self._scheduling.aborted(wire.required_id(request.request_id), note(request.message))
        return scheduler_pb2.AbortRequestResponse(keep=finished.keep)

    def _needed(self, request: scheduler_pb2.BlocksNeededRequest, _: str) -> scheduler_pb2.BlocksNeededResponse:
        answer = self._scheduling.blocks_needed(block_counts(request.group_block_counts), wire.needed_by(request))
        incarnation = self._lead.node.state.incarnation
        return scheduler_pb2.BlocksNeededResponse(reclaimed=answers.reclaimed(answer, incarnation))

    def _table(
        self,
        request: scheduler_pb2.BlocksAllocatedRequest
        | scheduler_pb2.TokensComputedRequest
        | scheduler_pb2.RequestFinishedRequest,
    ) -> Any:
        """Returns the blocks of a request, with the same checks as in any call."""
        self._scheduling.hear(wire.required_id(request.request_id))
        state, limit = self._lead.node.state, self._lead.block_limit
        state.check_life(request.blocks.incarnation)
        blocks = state.resolve(lists_of("blocks", request.blocks, limit), "blocks")
        return wire.with_dropped(blocks, request.dropped_block_counts, limit)


def _refuse(into: scheduler_pb2.ScheduleAnswer, error: KVGrpcError) -> None:
    into.failure.CopyFrom(refusal(error.untraced()))
    into.status_code = status_code(error).value[0]
