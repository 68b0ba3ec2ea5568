"""Calls of a session: requests of the public API to events, and the node's answers to CallAnswers."""

from dataclasses import replace
from typing import Any

from kvgrpc.core import actions, events
from kvgrpc.core.values.owners import ENGINE
from kvgrpc.errors import InvalidRequest, KVGrpcError, Reason, invalid
from kvgrpc.service import methods, telemetry
from kvgrpc.service.call_records import OK
from kvgrpc.service.grpc_status import next_step
from kvgrpc.service.identity.gate import check_local
from kvgrpc.service.lead import Lead
from kvgrpc.service.methods import Method
from kvgrpc.service.runner import wall_us
from kvgrpc.session.v1 import rank_pb2, session_pb2
from kvgrpc.v1 import common_pb2, handoff_pb2
from kvgrpc.wire import answers, fields, requests, session as wire
from kvgrpc.wire.values import error_row

_METHODS: dict[str, Method[Any, Any, Any]] = {
    "finished_blocks": methods.FINISHED_BLOCKS,
    "pull_blocks": methods.PULL_BLOCKS,
    "reserve_blocks": methods.RESERVE_BLOCKS,
    "register_push": methods.REGISTER_PUSH,
    "cancel_transfer": methods.CANCEL_TRANSFER,
    "renew_leases": methods.RENEW_LEASES,
    "release_lease": methods.RELEASE_LEASE,
    "grant_lease": methods.GRANT_LEASE,
    "allocate_blocks": methods.ALLOCATE_BLOCKS,
    "free_blocks": methods.FREE_BLOCKS,
    "reclaim_blocks": methods.RECLAIM_BLOCKS,
}
"""The methods that an engine calls, by their field in a Call and in a CallAnswer."""
_MAY_WAIT = ("pull_blocks", "reserve_blocks")
_MAKE_TRANSFERS = frozenset({"finished_blocks", "pull_blocks", "reserve_blocks", "register_push"})


def call_to_event(lead: Lead, call: session_pb2.Call, call_id: int) -> events.Event:
    """Returns the event of a call. Raises KVGrpcError."""
    kind = call.WhichOneof("request")
    fields.check(call)
    if kind is not None:
        check_local(f"{call.DESCRIPTOR.full_name}/{kind}")
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
    made = requests.make_call(call_id, ENGINE, trace, _METHODS[kind].name, request, wall_us=wall_us())
    return _METHODS[kind].to_event(lead, request, made)


def _step_done(lead: Lead, report: rank_pb2.StepReport) -> events.StepDone:
    """Returns the step of rank 0. A scheduler can speak for no other rank, and only in an engine of one rank."""
    if lead.runner.node.state.life.engine.world_size != 1:
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


def begin_trace(call: session_pb2.Call) -> telemetry.Ended | None:
    """Begins the trace of a call that makes a transfer, if spans are kept here and its engine has none. Returns the
    callback that ends its span.
    """
    kind = call.WhichOneof("request")
    if call.traceparent or kind not in _MAKE_TRANSFERS:
        return None
    root = telemetry.root_span(f"{call.DESCRIPTOR.full_name}/{kind}")
    if root is None:
        return None
    call.traceparent, ended = root
    return ended


def hear_session(
    lead: Lead, call: session_pb2.Call, began: float, error: KVGrpcError | None, ended: telemetry.Ended | None = None
) -> None:
    """Counts an answered call, makes its span, and records it if it is one that the audit has. `began` is as for
    `CallRecords`, and `ended` what `begin_trace` returned.
    """
    kind = call.WhichOneof("request")
    if kind is not None:
        method = f"{call.DESCRIPTOR.full_name}/{kind}"
        if lead.calls.counting:
            lead.calls.ended(method, error.code if error else OK, began)
        if ended is not None:
            ended(error)
        elif call.traceparent:
            telemetry.call_ended(method, answers.readable_trace(call.traceparent), began, error)
    if kind in _METHODS:
        lead.audit.heard(_METHODS[kind].name, getattr(call, kind), ENGINE, error=error)


def put_answer(
    lead: Lead, call: session_pb2.Call, answer: actions.Answer | KVGrpcError, made: session_pb2.CallAnswer
) -> None:
    """Writes the answer to a call into `made`, which is empty."""
    made.call_id = call.call_id
    if isinstance(answer, KVGrpcError):
        made.failure.CopyFrom(refusal(answer))
        made.code = answer.code
        return
    kind = call.WhichOneof("request")
    if call.finished_blocks.for_readers.lease_id and isinstance(answer, actions.HandedOver):
        answer = replace(answer, token=b"")  # the engine minted the grant itself
    reply = getattr(made, kind or "")
    reply.SetInParent()  # some answers have nothing to tell
    _METHODS[kind or ""].put_reply(answer, reply, lead.runner.time(), lead.runner.node.state.life.incarnation)


def refusal(error: KVGrpcError) -> common_pb2.Failure:
    """Returns a refusal with all its details: the fields that are wrong, and the next step."""
    row = error_row(error)
    row.next = common_pb2.NextStep.Value(f"NEXT_STEP_{next_step(error)}")
    return row
