"""Builds the requests of SchedulerService, one function for each hook.

`Scheduler` has a method of the same name and arguments, which sends the request alone; `Scheduler.step` sends many in
one message. Optional arguments are fields of the same name, except `timeout_s`, which counts for a request sent alone.
"""

from collections.abc import Mapping
from typing import Any, Unpack

from kvgrpc.client import options as opt
from kvgrpc.client.values import AnyBlocks, Tokens, as_blocks, as_content, block_counts, fields
from kvgrpc.v1.common_pb2 import Grant
from kvgrpc.v1.scheduler_pb2 import (
    REQUEST_OUTCOME_COMPLETE,
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
    **options: Unpack[opt.RequestArrivedOptions],
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


def match_tokens(request_id: str, computed_tokens: int = 0, **options: Unpack[opt.CallOptions]) -> MatchTokensRequest:
    """Asks how many tokens beyond those computed here can come from elsewhere. Changes nothing."""
    return MatchTokensRequest(request_id=request_id, computed_tokens=computed_tokens, **fields(options))


def blocks_allocated(
    request_id: str, blocks: AnyBlocks, **options: Unpack[opt.BlocksAllocatedOptions]
) -> BlocksAllocatedRequest:
    """Reports all blocks of a request. The missing tokens begin to move, or the source is released."""
    return BlocksAllocatedRequest(request_id=request_id, **_table(blocks, options))


def tokens_computed(
    request_id: str, blocks: AnyBlocks, computed_tokens: int, **options: Unpack[opt.TokensComputedOptions]
) -> TokensComputedRequest:
    """Reports a scheduled step, after which `computed_tokens` tokens have KV."""
    return TokensComputedRequest(request_id=request_id, computed_tokens=computed_tokens, **_table(blocks, options))


def blocks_loaded(request_id: str, **options: Unpack[opt.CallOptions]) -> BlocksLoadedRequest:
    """Reports that a staged engine has copied what arrived."""
    return BlocksLoadedRequest(request_id=request_id, **fields(options))


def request_preempted(request_id: str, **options: Unpack[opt.CallOptions]) -> RequestPreemptedRequest:
    """Reports a preemption. The request's blocks may be reused once it is answered."""
    return RequestPreemptedRequest(request_id=request_id, **fields(options))


def request_finished(
    request_id: str,
    blocks: AnyBlocks,
    computed_tokens: int,
    outcome: RequestOutcome.ValueType = REQUEST_OUTCOME_COMPLETE,
    *,
    content: Tokens | None = None,
    **options: Unpack[opt.TokensComputedOptions],
) -> RequestFinishedRequest:
    """Reports the end of a request. The reply says whether to keep its blocks, and holds the grant for the next engine.
    `content` has the tokens of prompt and answer, for an engine that decodes and gives.
    """
    request = RequestFinishedRequest(
        request_id=request_id, computed_tokens=computed_tokens, outcome=outcome, **_table(blocks, options)
    )
    if content is not None:
        request.content.CopyFrom(as_content(content))
    return request


def abort_request(request_id: str, message: str = "", **options: Unpack[opt.CallOptions]) -> AbortRequestRequest:
    """Reports that the request is no longer wanted, in any state."""
    return AbortRequestRequest(request_id=request_id, message=message, **fields(options))


def blocks_needed(counts: int | Mapping[int, int], **options: Unpack[opt.Needed]) -> BlocksNeededRequest:
    """Asks for blocks that the scheduler lacks: a count of the only group, or {group: count}. Blocks of unclaimed
    hand-overs come back, all or none. `request_time_us` and `request_id` name the oldest request that waits for blocks;
    with them, hand-overs also yield if their readers are younger and wait for blocks of their own.
    """
    return BlocksNeededRequest(group_block_counts=block_counts(counts), **fields(options))


def in_step(call: StepCall) -> ScheduleCall:
    """Wraps a request as one call of a step. Raises TypeError for any other value."""
    field = _FIELDS.get(call.DESCRIPTOR)
    if field is None:
        raise TypeError(f"a step has calls of SchedulerService, not {type(call).__name__}")
    made: dict[str, Any] = {field: call}
    return ScheduleCall(**made)


_FIELDS = {row.message_type: row.name for row in ScheduleCall.DESCRIPTOR.fields}
"""Fields of a step's call, by the types of their requests."""


def _table(blocks: AnyBlocks, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields for all blocks of a request, with the life of their ids, and for the other options."""
    others = {name: value for name, value in options.items() if name != "incarnation"}
    return {"blocks": as_blocks(blocks, options.get("incarnation", 0)), **fields(others)}
