"""Calls of a session: requests of the public API to events, and the node's answers to CallAnswers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvgrpc.core import actions, events
from kvgrpc.core.tables.transfers import Transfer
from kvgrpc.core.values.owners import ENGINE
from kvgrpc.errors import InvalidRequest, KVGrpcError, Reason, invalid
from kvgrpc.service.lead import Lead
from kvgrpc.service.runner import wall_us
from kvgrpc.service.status import next_step
from kvgrpc.session.v1 import rank_pb2, session_pb2
from kvgrpc.v1 import common_pb2, handoff_pb2, lease_pb2, pool_pb2, transfer_pb2
from kvgrpc.wire import answers, fields, requests, session as wire
from kvgrpc.wire.values import duration, error_row, grant, pool_blocks

_METHODS = {
    "finished_blocks": "FinishedBlocks",
    "pull_blocks": "PullBlocks",
    "reserve_blocks": "ReserveBlocks",
    "register_push": "RegisterPush",
    "cancel_transfer": "CancelTransfer",
    "renew_leases": "RenewLeases",
    "release_lease": "ReleaseLease",
    "grant_lease": "GrantLease",
    "allocate_blocks": "AllocateBlocks",
    "free_blocks": "FreeBlocks",
    "reclaim_blocks": "ReclaimBlocks",
}

_MAY_WAIT = ("pull_blocks", "reserve_blocks")


def call_to_event(lead: Lead, call: session_pb2.Call, call_id: int) -> events.Event:
    """Returns the event of a call. Raises KVGrpcError."""
    kind = call.WhichOneof("request")
    fields.check(call)
    if kind == "step_done":
        return _step_done(lead, call.step_done)
    if kind == "voided":
        return events.Tick()  # the flags are read before every event
    if kind is None:
        raise InvalidRequest(Reason.INVALID_FIELD, "a call has a request that this server knows")
    request = getattr(call, kind)
    if kind in _MAY_WAIT and request.HasField("wait"):
        raise invalid(f"{kind}.wait", "is not for a session, whose events tell the end")
    trace = answers.readable_trace(call.traceparent)
    made = replace(requests.make_call(call_id, ENGINE, trace, _METHODS[kind], request), wall_us=wall_us())
    convert: dict[str, Callable[[], events.Event]] = {
        "finished_blocks": lambda: requests.finished_blocks(request, made, lead.weights, lead.block_limit),
        "pull_blocks": lambda: requests.pull_blocks(request, made, lead.weights, lead.block_limit),
        "reserve_blocks": lambda: requests.reserve_blocks(request, made, lead.weights, lead.block_limit),
        "register_push": lambda: requests.register_push(request, made),
        "cancel_transfer": lambda: requests.cancel_transfer(request, made),
        "renew_leases": lambda: requests.renew_leases(request, made, lead.renewal_limit),
        "release_lease": lambda: requests.release_lease(request, made),
        "grant_lease": lambda: requests.grant_lease(request, made, lead.weights, lead.block_limit),
        "allocate_blocks": lambda: requests.allocate_blocks(request, made),
        "free_blocks": lambda: requests.free_blocks(request, made, lead.block_limit),
        "reclaim_blocks": lambda: requests.reclaim_blocks(request, made),
    }
    return convert[kind]()


def _step_done(lead: Lead, report: rank_pb2.StepReport) -> events.StepDone:
    """Returns the step of rank 0. A scheduler can speak for no other rank, and only in an engine of one rank."""
    if lead.node.state.pool.world_size != 1:
        raise invalid("step_done", "is for engines with one rank: each worker reports the steps of its own")
    return wire.step_of(0, report)


def promised_lease(request: handoff_pb2.FinishedBlocksRequest) -> str:
    """Returns the lease id that the engine minted for its hand-over; empty if it minted none."""
    job = request.WhichOneof("job")
    return getattr(request, job).lease_id if job in ("part", "for_readers") else ""


def refused_lease(call: session_pb2.Call, call_id: int) -> events.FinishedBlocks | None:
    """Returns a hand-over for the node to refuse, for a call refused before the node sees it: an opening that waits for
    the call's lease learns it. None for calls that promised no lease.
    """
    lease_id = promised_lease(call.finished_blocks) if call.HasField("finished_blocks") else ""
    if not lease_id or call.finished_blocks.validate_only:
        return None
    made = events.Call(call_id, ENGINE, answers.readable_trace(call.traceparent))
    return events.FinishedBlocks(made, call.finished_blocks.transfer_key, (), None, lease_id=lease_id)


def put_answer(
    lead: Lead, call: session_pb2.Call, answer: actions.Answer | KVGrpcError, made: session_pb2.CallAnswer
) -> None:
    """Writes the answer to a call into `made`, which is empty."""
    made.call_id = call.call_id
    now, incarnation = lead.runner.now, lead.node.state.incarnation
    match answer:
        case KVGrpcError():
            made.failure.CopyFrom(refusal(answer))
            made.code = answer.code
        case actions.Cancelled():
            made.cancel_transfer.CopyFrom(
                transfer_pb2.CancelTransferResponse(
                    outcome=answers.OUTCOMES[answer.outcome],
                    transfers=[answers.transfer(transfer, now) for transfer in answer.transfers],
                )
            )
        case actions.Renewed():
            made.renew_leases.CopyFrom(lease_pb2.RenewLeasesResponse(leases=answers.renewed(answer)))
        case actions.Released():
            made.release_lease.CopyFrom(lease_pb2.ReleaseLeaseResponse(lease=answers.lease(answer.lease, incarnation)))
        case actions.Allocated() | actions.Freed() | actions.Reclaimed():
            _pool_answer(made, answer, incarnation)
        case actions.HandedOver() if call.WhichOneof("request") == "grant_lease":
            made.grant_lease.CopyFrom(
                lease_pb2.GrantLeaseResponse(
                    lease=answers.lease(answer.lease, incarnation), grant=grant(answer.token) if answer.token else None
                )
            )
        case _:
            _handoff_answer(made, answer, now, incarnation)


def _handoff_answer(made: session_pb2.CallAnswer, answer: actions.Answer, now: float, incarnation: int) -> None:
    match answer:
        case actions.HandedOver():  # without a transfer: validate_only
            made.finished_blocks.lease.CopyFrom(answers.lease(answer.lease, incarnation))
            if answer.transfer:
                made.finished_blocks.transfer.CopyFrom(answers.transfer(answer.transfer, now))
        case actions.GaveUp():
            made.finished_blocks.CopyFrom(handoff_pb2.FinishedBlocksResponse(transfer=_transfer(answer.transfer, now)))
        case actions.Expected():
            made.finished_blocks.SetInParent()
        case actions.Reserved():
            made.reserve_blocks.CopyFrom(
                handoff_pb2.ReserveBlocksResponse(
                    transfer=_transfer(answer.transfer, now), grant=grant(answer.token) if answer.token else None
                )
            )
        case actions.Registered():
            made.register_push.CopyFrom(handoff_pb2.RegisterPushResponse(transfer=_transfer(answer.transfer, now)))
        case actions.Pulling():
            made.pull_blocks.SetInParent()  # validate_only has no other answer
            if answer.transfer:
                made.pull_blocks.transfer.CopyFrom(answers.transfer(answer.transfer, now))


def _transfer(value: Transfer | None, now: float) -> transfer_pb2.Transfer | None:
    return answers.transfer(value, now) if value else None


def refusal(error: KVGrpcError) -> common_pb2.Failure:
    """Returns a refusal with all its details: the fields that are wrong, and the next step."""
    row = error_row(error)
    row.next = common_pb2.NextStep.Value(f"NEXT_STEP_{next_step(error)}")
    return row


def _pool_answer(made: session_pb2.CallAnswer, answer: Any, incarnation: int) -> None:
    if isinstance(answer, actions.Allocated):
        remaining = None if answer.remaining_s is None else duration(answer.remaining_s)
        made.allocate_blocks.CopyFrom(
            pool_pb2.AllocateBlocksResponse(blocks=answers.allocated_blocks(answer, incarnation), remaining=remaining)
        )
    elif isinstance(answer, actions.Freed):
        made.free_blocks.CopyFrom(pool_pb2.FreeBlocksResponse(freed_blocks=pool_blocks(answer.freed, incarnation)))
    elif isinstance(answer, actions.Reclaimed):
        made.reclaim_blocks.CopyFrom(pool_pb2.ReclaimBlocksResponse(reclaimed=answers.reclaimed(answer, incarnation)))
