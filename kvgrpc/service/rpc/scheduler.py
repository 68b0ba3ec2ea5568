"""SchedulerService: the policy for schedulers in any language."""

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvgrpc.core.policy.policy import name_taken
from kvgrpc.core.values.owners import Verb
from kvgrpc.errors import InternalError, InvalidRequest, KVGrpcError, Reason, note
from kvgrpc.service import telemetry
from kvgrpc.service.call_records import OK
from kvgrpc.service.callers import PRINCIPAL
from kvgrpc.service.grpc_status import status_code
from kvgrpc.service.lead import Lead
from kvgrpc.service.rpc.method import streaming, unary
from kvgrpc.service.runner import wall_us
from kvgrpc.service.scheduler.lead_scheduler import LeadScheduler
from kvgrpc.service.session.session_calls import refusal
from kvgrpc.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from kvgrpc.wire import answers, scheduler as wire
from kvgrpc.wire.bounds import TEXT_BYTES_MAX, check_count
from kvgrpc.wire.fields import Budget
from kvgrpc.wire.requests import block_counts
from kvgrpc.wire.values import grant, lists_of, seconds

_log = logging.getLogger(__name__)
STEP_CALLS_MAX = 1_024
"""Maximum number of calls in a step: the answer to a step is one message."""
TURN_S = 0.02
"""Time to handle a step's calls before others have their turn, in seconds: far longer than a scheduler's step takes."""

NO_REQUEST = "-" * (TEXT_BYTES_MAX + 1)
"""Request id that no request has: it is too long for one."""

_Request = TypeVar("_Request", bound=Message)
_Reply = TypeVar("_Reply", bound=Message)

_FIELDS = {row.message_type.name: row.name for row in scheduler_pb2.ScheduleCall.DESCRIPTOR.fields if row.message_type}
"""Fields of a step's call, by the names of their request messages."""
_METHODS = {field: f"kvgrpc.v1.SchedulerService/{name.removesuffix('Request')}" for name, field in _FIELDS.items()}
HOOKS: dict[str, Callable[["SchedulerService", Any, str], Message]] = {}
"""Hooks by their field in a step's call. Each returns the reply to (service, request, traceparent), without header."""


def _hook(
    answer: Callable[["SchedulerService", _Request, str], _Reply],
) -> Callable[["SchedulerService", _Request, Any], Awaitable[_Reply]]:
    """Puts a method into HOOKS, where steps find it, and makes it the unary RPC of its name."""
    HOOKS[_FIELDS[f"{answer.__name__}Request"]] = answer

    @unary
    @functools.wraps(answer)
    async def alone(self: "SchedulerService", request: _Request, trace: str) -> _Reply:
        self._check_caller()
        reply = self._own(answer, request, trace)
        header: common_pb2.ResponseHeader = reply.header  # type: ignore[attr-defined]
        header.CopyFrom(self._lead.header())
        return reply

    return alone


class SchedulerService(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Converts a request, asks the policy, and converts its answer."""

    def __init__(self, lead: Lead) -> None:
        self._lead = lead
        self._scheduler = LeadScheduler(lead)

    # -- the hooks

    @_hook
    def RequestArrived(
        self, request: scheduler_pb2.RequestArrivedRequest, trace: str
    ) -> scheduler_pb2.RequestArrivedResponse:
        self._lead.runner.node.state.life.check(request.incarnation)
        admitted = self._scheduler.arrived(wire.arrived(request, self._lead.weights, trace, wall_us()))
        return scheduler_pb2.RequestArrivedResponse(prompt_tokens=admitted.prompt_tokens, one_token=admitted.one_token)

    @_hook
    def MatchTokens(self, request: scheduler_pb2.MatchTokensRequest, _: str) -> scheduler_pb2.MatchTokensResponse:
        self._scheduler.hear(wire.required_id(request.request_id))
        found = self._scheduler.match(request.request_id, request.computed_tokens)
        return scheduler_pb2.MatchTokensResponse(external_tokens=found.tokens)

    @_hook
    def BlocksAllocated(
        self, request: scheduler_pb2.BlocksAllocatedRequest, _: str
    ) -> scheduler_pb2.BlocksAllocatedResponse:
        table = self._table(request)
        self._scheduler.allocated(
            request.request_id, table, request.computed_tokens, request.external_tokens, request.after_step
        )
        return scheduler_pb2.BlocksAllocatedResponse()

    @_hook
    def TokensComputed(
        self, request: scheduler_pb2.TokensComputedRequest, _: str
    ) -> scheduler_pb2.TokensComputedResponse:
        table = self._table(request)
        self._scheduler.computed(request.request_id, table, request.computed_tokens, request.step)
        return scheduler_pb2.TokensComputedResponse()

    @_hook
    def BlocksLoaded(self, request: scheduler_pb2.BlocksLoadedRequest, _: str) -> scheduler_pb2.BlocksLoadedResponse:
        self._scheduler.hear(wire.required_id(request.request_id))
        self._scheduler.loaded(request.request_id)
        return scheduler_pb2.BlocksLoadedResponse()

    @_hook
    def RequestPreempted(
        self, request: scheduler_pb2.RequestPreemptedRequest, _: str
    ) -> scheduler_pb2.RequestPreemptedResponse:
        self._scheduler.hear(wire.required_id(request.request_id))
        self._scheduler.preempted(request.request_id)
        return scheduler_pb2.RequestPreemptedResponse()

    @_hook
    def RequestFinished(
        self, request: scheduler_pb2.RequestFinishedRequest, _: str
    ) -> scheduler_pb2.RequestFinishedResponse:
        table, outcome = self._table(request), wire.outcome(request.outcome)
        names = wire.named(request.content, self._lead.weights)
        finished, token = self._scheduler.finished(
            request.request_id, names, table, request.computed_tokens, outcome, request.step
        )
        return scheduler_pb2.RequestFinishedResponse(
            keep=finished.keep,
            handed_over=finished.handed_over,
            grant=grant(token) if token else None,
            kv_transfer_params=wire.kv_transfer_params(token),
        )

    @_hook
    def AbortRequest(self, request: scheduler_pb2.AbortRequestRequest, _: str) -> scheduler_pb2.AbortRequestResponse:
        finished = self._scheduler.aborted(wire.required_id(request.request_id), note(request.message))
        return scheduler_pb2.AbortRequestResponse(keep=finished.keep)

    @_hook
    def BlocksNeeded(self, request: scheduler_pb2.BlocksNeededRequest, _: str) -> scheduler_pb2.BlocksNeededResponse:
        answer = self._scheduler.blocks_needed(block_counts(request.group_block_counts), wire.needed_by(request))
        incarnation = self._lead.runner.node.state.life.incarnation
        return scheduler_pb2.BlocksNeededResponse(reclaimed=answers.reclaimed(answer, incarnation))

    # -- news and steps

    @unary
    async def PollSchedulerNews(
        self, request: scheduler_pb2.PollSchedulerNewsRequest, trace: str
    ) -> scheduler_pb2.PollSchedulerNewsResponse:
        lead, news = self._lead, self._scheduler.news
        self._check_caller()
        lead.runner.node.state.life.check(request.incarnation)
        news.acknowledge(PRINCIPAL.get(), request.after_seq)
        self._scheduler.hear()
        await news.wait(PRINCIPAL.get(), min(seconds(request, "wait") or 0.0, lead.config.limits.wait_s))
        reply = scheduler_pb2.PollSchedulerNewsResponse(header=lead.header())
        wire.put_news(news.unread(PRINCIPAL.get()), reply, lead.runner.node.state.life.incarnation)
        return reply

    @streaming
    async def Schedule(
        self, request: AsyncIterator[scheduler_pb2.ScheduleRequest], trace: str
    ) -> AsyncIterator[scheduler_pb2.ScheduleResponse]:
        async for step in request:
            yield await self._step(step, trace)
            del step  # frees it now: the next step may come much later

    async def _step(self, request: scheduler_pb2.ScheduleRequest, trace: str) -> scheduler_pb2.ScheduleResponse:
        """Returns the answers to all calls, and the news. Serves others between long calls. Raises only before the
        first call.
        """
        self._check_caller()
        check_count("calls", len(request.calls), STEP_CALLS_MAX)
        self._lead.runner.node.state.life.check(request.incarnation)
        news = self._scheduler.news
        news.acknowledge(PRINCIPAL.get(), request.after_seq)
        self._scheduler.hear()
        reply, budget, began = scheduler_pb2.ScheduleResponse(), Budget(), time.monotonic()
        for call in request.calls:
            self._answer(call, budget, reply.answers.add(), trace)
            if time.monotonic() - began > TURN_S:
                await asyncio.sleep(0)
                began = time.monotonic()
        wire.put_news(news.unread(PRINCIPAL.get()), reply, self._lead.runner.node.state.life.incarnation)
        reply.header.CopyFrom(self._lead.header())
        return reply

    def _answer(
        self, call: scheduler_pb2.ScheduleCall, budget: Budget, into: scheduler_pb2.ScheduleAnswer, trace: str
    ) -> None:
        kind, began, error = call.WhichOneof("call"), time.perf_counter(), None
        try:
            budget.take(call)
            if kind is None:
                raise InvalidRequest(Reason.INVALID_FIELD, "a call is one that this server knows")
            made = self._own(HOOKS[kind], getattr(call, kind), trace)
            getattr(into, kind).CopyFrom(made)
            getattr(into, kind).SetInParent()
        except KVGrpcError as refused:
            error = refused
        except Exception as defect:  # noqa: BLE001 - a defect of ours must not fail later calls
            _log.exception("%s failed", kind)
            error = InternalError(Reason.INTERNAL, f"a defect of kvgrpc: {defect!r}")
        if error is not None:
            _refuse(into, error)
        if kind is not None:
            self._heard(kind, call, began, error)

    def _heard(self, kind: str, call: scheduler_pb2.ScheduleCall, began: float, error: KVGrpcError | None) -> None:
        """Counts a call of a step, and makes its span if its request has a trace of its own."""
        self._lead.calls.ended(_METHODS[kind], error.code if error else OK, began)
        if kind == "request_arrived" and call.request_arrived.traceparent:
            parent = answers.readable_trace(call.request_arrived.traceparent)
            telemetry.call_ended(_METHODS[kind], parent, began, error)

    # -- checks

    def _check_caller(self) -> None:
        """Raises PermissionDenied (NOT_OWNER) for a caller that does not schedule for this pool."""
        self._lead.runner.node.state.pool.check_owner(PRINCIPAL.get(), Verb.SCHEDULE)

    def _own(
        self, hook: Callable[["SchedulerService", _Request, str], _Reply], request: _Request, trace: str
    ) -> _Reply:
        """Answers a call about the caller's own request, and one about another tenant's as about an unknown one. Raises
        PermissionDenied (NOT_OWNER) for any other request, and AlreadyExists for a new one of another tenant's name.
        """
        named = getattr(request, "request_id", "")
        if self._scheduler.is_foreign(named):
            if isinstance(request, scheduler_pb2.RequestArrivedRequest):
                raise name_taken(named)
            unknown = type(request)()
            unknown.CopyFrom(request)
            unknown.request_id = NO_REQUEST  # type: ignore[attr-defined]
            request = unknown
        return hook(self, request, trace)

    def _table(
        self,
        request: scheduler_pb2.BlocksAllocatedRequest
        | scheduler_pb2.TokensComputedRequest
        | scheduler_pb2.RequestFinishedRequest,
    ) -> Any:
        """Returns the blocks of a request, with the same checks as in any call."""
        self._scheduler.hear(wire.required_id(request.request_id))
        state, limit = self._lead.runner.node.state, self._lead.block_limit
        state.life.check(request.blocks.incarnation)
        blocks = state.pool.resolve(lists_of("blocks", request.blocks, limit), "blocks")
        return wire.with_dropped(blocks, request.dropped_block_counts, limit)


def _refuse(into: scheduler_pb2.ScheduleAnswer, error: KVGrpcError) -> None:
    into.failure.CopyFrom(refusal(error.untraced()))
    into.status_code = status_code(error).value[0]
