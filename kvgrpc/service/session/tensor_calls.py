"""Calls of a session about tensors: the calls of TensorService, answered when they end, in any order."""

import logging
import time
from collections.abc import Awaitable, Callable

from google.protobuf.message import Message

from kvgrpc.errors import InternalError, KVGrpcError, Reason
from kvgrpc.service import telemetry
from kvgrpc.service.call_records import OK, CallRecords
from kvgrpc.service.identity.gate import check_local
from kvgrpc.service.session.session_calls import refusal
from kvgrpc.service.tensors.messages import of_session
from kvgrpc.service.tensors.staging_store import StagingStore
from kvgrpc.session.v1 import session_pb2
from kvgrpc.wire import fields
from kvgrpc.wire.answers import readable_trace

_log = logging.getLogger(__name__)
_KINDS = frozenset({"put_tensor", "get_tensor", "release_tensors"})


def takes_tensors(staging: StagingStore, call: session_pb2.Call, next_event: Callable[[], session_pb2.Event]) -> bool:
    """Returns whether the call is about tensors; it has begun then. Events of a session that is over go nowhere."""
    kind = call.WhichOneof("request")
    if kind not in _KINDS:
        return False
    work = of_session(staging, kind, call)
    staging.serve(_answer(work, kind, call, next_event, staging.lead.calls))
    return True


async def _answer(
    work: Callable[[], Awaitable[Message]],
    kind: str,
    call: session_pb2.Call,
    next_event: Callable[[], session_pb2.Event],
    calls: CallRecords,
) -> None:
    row, began = f"{call.DESCRIPTOR.full_name}/{kind}", time.perf_counter()
    error: KVGrpcError | None = None
    reply: Message | None = None
    try:
        fields.check(call)
        check_local(row)
        reply = await work()
    except KVGrpcError as refused:
        error = refused.untraced()
    except Exception as defect:  # noqa: BLE001 - no call may stop the server
        _log.exception("%s failed", kind)
        error = InternalError(Reason.INTERNAL, f"a defect of kvgrpc: {defect!r}")
    calls.ended(row, error.code if error else OK, began)
    telemetry.call_ended(row, readable_trace(call.traceparent), began, error)
    if error is None and not call.call_id:
        return
    made = next_event().answer
    made.call_id = call.call_id
    if error is not None:
        made.failure.CopyFrom(refusal(error))
        made.code = error.code
    elif reply is not None:
        getattr(made, kind).CopyFrom(reply)
