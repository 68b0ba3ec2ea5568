"""Builds the requests of SchedulerService for `Scheduler.step`, which sends many in one message.

Each function is named after its RPC, and its optional arguments are fields of the same name.
"""

from collections.abc import Mapping
from typing import Any, Unpack

from kvgrpc.client import options as opt
from kvgrpc.client.values import AnyBlocks, Tokens, as_blocks, as_content, block_counts, fields
from kvgrpc.v1.common_pb2 import Grant
from kvgrpc.v1.scheduler_pb2 import (
    AbortRequestRequest,
    BlocksAllocatedRequest,
    BlocksLoadedRequest,
    BlocksNeededRequest,
    KvGift,
    MatchTokensRequest,
    PushOffer,
    RequestArrivedRequest,
    RequestFinishedRequest,
    RequestOutcome,
    RequestPreemptedRequest,
    ScheduleCall,
    TokensComputedRequest,
)

StepCall = (
    RequestArrivedRequest
    | MatchTokensRequest
    | BlocksAllocatedRequest
    | TokensComputedRequest
    | BlocksLoadedRequest
    | RequestPreemptedRequest
    | RequestFinishedRequest
    | AbortRequestRequest
    | BlocksNeededRequest
)


def request_arrived(
    request_id: str,
    prompt: Tokens | None = None,
    *,
    take: Grant | PushOffer | None = None,
    give: KvGift | None = None,
    **options: Unpack[opt.Arrival],
) -> RequestArrivedRequest:
    """Reports a new request. `take`: KV that it pulls, or that is pushed to it. `give`: others will want its KV."""
    request = RequestArrivedRequest(request_id=request_id, give=give, **fields(options))
    if prompt is not None:
        request.prompt.CopyFrom(as_content(prompt))
    if isinstance(take, Grant):
        request.offer.CopyFrom(take)
    elif take is not None:
        request.push.CopyFrom(take)
    return request


def match_tokens(request_id: str, computed_tokens: int = 0) -> MatchTokensRequest:
    """Asks how many tokens beyond those computed here can come from elsewhere."""
    return MatchTokensRequest(request_id=request_id, computed_tokens=computed_tokens)


def blocks_allocated(request_id: str, blocks: AnyBlocks, **options: Unpack[opt.Allocated]) -> BlocksAllocatedRequest:
    """Reports all blocks of a request."""
    return BlocksAllocatedRequest(request_id=request_id, **_table(blocks, options))


def tokens_computed(
    request_id: str, blocks: AnyBlocks, computed_tokens: int, **options: Unpack[opt.Computed]
) -> TokensComputedRequest:
    """Reports a scheduled step, after which `computed_tokens` tokens have KV."""
    return TokensComputedRequest(request_id=request_id, computed_tokens=computed_tokens, **_table(blocks, options))


def blocks_loaded(request_id: str) -> BlocksLoadedRequest:
    """Reports that a staged engine has copied what arrived."""
    return BlocksLoadedRequest(request_id=request_id)


def request_preempted(request_id: str) -> RequestPreemptedRequest:
    """Reports that the scheduler gives the request's blocks to another request."""
    return RequestPreemptedRequest(request_id=request_id)


def request_finished(
    request_id: str,
    blocks: AnyBlocks,
    computed_tokens: int,
    outcome: RequestOutcome.ValueType,
    *,
    content: Tokens | None = None,
    **options: Unpack[opt.Computed],
) -> RequestFinishedRequest:
    """Reports the end of a request. `content` has the tokens of prompt and answer, for an engine that decodes and
    gives.
    """
    request = RequestFinishedRequest(
        request_id=request_id,
        computed_tokens=computed_tokens,
        outcome=outcome,
        **_table(blocks, options),
    )
    if content is not None:
        request.content.CopyFrom(as_content(content))
    return request


def abort_request(request_id: str, message: str = "") -> AbortRequestRequest:
    """Reports that the request is no longer wanted."""
    return AbortRequestRequest(request_id=request_id, message=message)


def blocks_needed(
    counts: int | Mapping[int, int], *, request_time_us: int = 0, request_id: str = ""
) -> BlocksNeededRequest:
    """Asks for blocks that the scheduler lacks: a count of the only group, or {group: count}. `request_time_us` and
    `request_id` name the oldest request that waits for blocks.
    """
    return BlocksNeededRequest(
        group_block_counts=block_counts(counts), request_time_us=request_time_us, request_id=request_id
    )


def in_step(call: StepCall) -> ScheduleCall:
    """Wraps a request as one call of a step. Raises TypeError for any other value."""
    field = _FIELDS.get(type(call))
    if field is None:
        raise TypeError(f"a step has calls of SchedulerService, not {type(call).__name__}")
    made: dict[str, Any] = {field: call}
    return ScheduleCall(**made)


_FIELDS: dict[type[StepCall], str] = {
    RequestArrivedRequest: "request_arrived",
    MatchTokensRequest: "match_tokens",
    BlocksAllocatedRequest: "blocks_allocated",
    TokensComputedRequest: "tokens_computed",
    BlocksLoadedRequest: "blocks_loaded",
    RequestPreemptedRequest: "request_preempted",
    RequestFinishedRequest: "request_finished",
    AbortRequestRequest: "abort_request",
    BlocksNeededRequest: "blocks_needed",
}


def _table(blocks: AnyBlocks, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields for all blocks of a request, with the life of their ids, and for the other options."""
    others = {name: value for name, value in options.items() if name != "incarnation"}
    return {"blocks": as_blocks(blocks, options.get("incarnation", 0)), **fields(others)}
