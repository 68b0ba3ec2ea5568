"""Errors to gRPC statuses with typed details, and back. The codes stand with the classes in `errors`."""

from contextvars import ContextVar
from itertools import islice
from typing import NoReturn, Protocol

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from kvgrpc.errors import (
    BY_CODE,
    VIOLATIONS_MAX,
    Exhausted,
    FieldViolation,
    InternalError,
    KVGrpcError,
    NextStep,
    OutOfRange,
    Reason,
    note,
    said_once,
)
from kvgrpc.v1 import calls_pb2, common_pb2

DOMAIN = "kvgrpc.dev"
DETAILS_KEY = "grpc-status-details-bin"
TOO_LARGE = "larger than max"
"""gRPC's own text, in every language, for a message longer than its reader takes. Its status code is that of a passing
failure, although a retry cannot help.
"""
_BY_KIND = {
    "INVALID_ARGUMENT": NextStep.FIX_REQUEST,
    "OUT_OF_RANGE": NextStep.FIX_REQUEST,
    "NOT_FOUND": NextStep.RECOMPUTE,
    "ALREADY_EXISTS": NextStep.FIX_REQUEST,
    "FAILED_PRECONDITION": NextStep.FIX_REQUEST,
    "UNAUTHENTICATED": NextStep.FIX_REQUEST,
    "PERMISSION_DENIED": NextStep.FIX_REQUEST,
    "ABORTED": NextStep.RECOMPUTE,
    "RESOURCE_EXHAUSTED": NextStep.RETRY_HERE,
    "UNAVAILABLE": NextStep.RETRY_HERE,
    "DEADLINE_EXCEEDED": NextStep.RETRY_HERE,
    "DATA_LOSS": NextStep.RETRY_HERE,
    "UNIMPLEMENTED": NextStep.RETRY_OTHER_CONSUMER,
    "INTERNAL": NextStep.RECOMPUTE,
}
_BY_REASON = {
    Reason.ACCESS_CLOSED: NextStep.RECOMPUTE,
    Reason.ACCESS_NOT_FOUND: NextStep.RECOMPUTE,
    Reason.CANCELLED: NextStep.RECOMPUTE,
    Reason.DRAINING: NextStep.RETRY_OTHER_CONSUMER,
    Reason.ENGINE_LOST: NextStep.RECOMPUTE,
    Reason.INCOMPATIBLE_POOLS: NextStep.RETRY_OTHER_CONSUMER,
    Reason.LEASE_EXPIRED: NextStep.RECOMPUTE,
    Reason.LEASE_NOT_FOUND: NextStep.RECOMPUTE,
    Reason.LEASE_RECLAIMED: NextStep.RECOMPUTE,
    Reason.LEASE_REFUSED: NextStep.RECOMPUTE,
    Reason.LEASE_RELEASED: NextStep.RECOMPUTE,
    Reason.LEASE_VOIDED: NextStep.RECOMPUTE,
    Reason.MEMORY_CHANGED: NextStep.RECOMPUTE,
    Reason.NO_DATA_PATH: NextStep.RETRY_OTHER_CONSUMER,
    Reason.NO_HANDSHAKE: NextStep.RETRY_HERE,
    Reason.NOT_PROVED: NextStep.RETRY_HERE,
    Reason.PEER_FAILED: NextStep.RETRY_OTHER_CONSUMER,
    Reason.PEER_UNREACHABLE: NextStep.RETRY_OTHER_CONSUMER,
    Reason.PREEMPTED: NextStep.RECOMPUTE,
    Reason.PROTOCOL_UNSUPPORTED: NextStep.RETRY_OTHER_CONSUMER,
    Reason.SOURCE_FAILED: NextStep.RECOMPUTE,
    Reason.TRANSFER_ENDED: NextStep.RECOMPUTE,
    Reason.WEIGHTS_MISMATCH: NextStep.RETRY_OTHER_CONSUMER,
    Reason.WRONG_ENGINE: NextStep.FIX_REQUEST,
}
RETRY_DELAY_MAX_S = 60.0
"""Maximum retry delay taken from a peer's error, in seconds: a peer cannot make callers wait for ever."""
METADATA_MAX = 16
"""Maximum number of metadata entries kept of a peer's error."""
MESSAGE_CHARS_MAX = 2_000
"""Maximum length of a status message, in characters: a status travels in headers, which proxies bound at 8 KiB."""


class AbortContext(Protocol):
    """The part of a call's context that `abort` needs."""

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: tuple[tuple[str, bytes], ...] = ()
    ) -> NoReturn: ...


ABORTED_AS: ContextVar[str] = ContextVar("aborted_as", default=grpc.StatusCode.UNKNOWN.name)
"""Name of the code with which the current task ended its call. gRPC's context does not tell."""


async def abort(context: AbortContext, error: KVGrpcError, who: common_pb2.ResponseHeader) -> NoReturn:
    """Ends a call with the status of `error`, refused by the engine in `who` unless the error names another one."""
    error.untraced()  # a frame that raised it may hold it, and outer frames hold the request
    packed = packed_status(error, who)
    ABORTED_AS.set(error.code)
    try:
        await context.abort(status_code(error), _said(error), trailing_metadata=((DETAILS_KEY, packed),))
    except BaseException as ended:
        # The context keeps the exception that ends its call: it must refer neither to the context nor to the request.
        ended.__context__ = None
        raise
    finally:
        del context, error


def packed_status(error: KVGrpcError, who: common_pb2.ResponseHeader) -> bytes:
    """Returns the google.rpc.Status of `error`, refused by the engine in `who` unless the error names another one."""
    code = status_code(error).value[0]
    status: Message = status_pb2.Status(code=code, message=_said(error), details=details(error, who))
    return status.SerializeToString()


def _said(error: KVGrpcError) -> str:
    return str(error)[:MESSAGE_CHARS_MAX]


def status_code(error: KVGrpcError) -> grpc.StatusCode:
    """Returns the gRPC code of an error."""
    return grpc.StatusCode[error.code]


def next_step(error: KVGrpcError) -> NextStep:
    """Returns the next step after a refusal: the error's own; else to retry here if the error has a delay; else the
    step of its reason, else of its class.
    """
    if error.next is not None:
        return error.next
    if error.retry_delay_s is not None:
        return NextStep.RETRY_HERE
    return _BY_REASON.get(error.reason) or _BY_KIND[error.code]


def details(error: KVGrpcError, who: common_pb2.ResponseHeader) -> list[AnyMessage]:
    """Returns the details of a status: ErrorInfo always, BadRequest with violations, RetryInfo with a delay."""
    said = {"next": next_step(error).value, "engine_id": who.engine_id, "incarnation": str(who.incarnation)}
    info = error_details_pb2.ErrorInfo(reason=error.reason.value, domain=DOMAIN, metadata={**said, **error.metadata})
    found: list[error_details_pb2.ErrorInfo | error_details_pb2.BadRequest | error_details_pb2.RetryInfo] = [info]
    if error.violations:
        rows = [
            error_details_pb2.BadRequest.FieldViolation(field=v.field, description=v.description)
            for v in error.violations
        ]
        found.append(error_details_pb2.BadRequest(field_violations=rows))
    if error.retry_delay_s is not None:
        delay = Duration(nanos=0)
        delay.FromNanoseconds(int(error.retry_delay_s * 1e9))
        found.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for message in found:
        holder = AnyMessage()
        holder.Pack(message)
        packed.append(holder)
    return packed


def from_rpc_error(error: grpc.aio.AioRpcError) -> KVGrpcError:
    """Returns the typed error that a peer raised; for a status without our details, an error of the code's class."""
    found = _of_code(error.code().name, error.details() or "")
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            _add_details(found, value)
    if isinstance(found, Exhausted) and found.reason is Reason.PEER_FAILED and TOO_LARGE in found.message:
        return OutOfRange(Reason.LIMIT_EXCEEDED, found.message)
    return found


def from_call_status(error: calls_pb2.CallStatus) -> KVGrpcError:
    """Returns the typed error that a peer answered to a call on a stream. An unknown code becomes InternalError."""
    found = _of_code(_CODES.get(error.code, "UNKNOWN"), error.message)
    _add_details(found, error.SerializeToString())
    return found


def _of_code(code: str, message: str) -> KVGrpcError:
    return BY_CODE.get(code, InternalError)(_FALLBACK.get(code, Reason.PEER_FAILED), message or code)


_CODES = {code.value[0]: code.name for code in grpc.StatusCode}
_FALLBACK = {"UNAVAILABLE": Reason.PEER_UNREACHABLE, "DEADLINE_EXCEEDED": Reason.PEER_UNREACHABLE}


def _add_details(error: KVGrpcError, packed: bytes) -> None:
    """Adds the readable details of a peer's status to the error."""
    try:
        status = status_pb2.Status.FromString(packed)
        for detail in status.details:
            _add_detail(error, detail)
    except DecodeError:
        return
    message = said_once(status.message, error.reason, error.violations)
    error.message = note(message) or error.message


def _add_detail(error: KVGrpcError, detail: AnyMessage) -> None:
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    if detail.Unpack(info) and info.reason in Reason.__members__:
        error.reason = Reason[info.reason]
        error.metadata = {note(k): note(v) for k, v in islice(info.metadata.items(), METADATA_MAX)}
    elif detail.Unpack(bad):
        error.violations = tuple(FieldViolation(v.field, v.description) for v in bad.field_violations[:VIOLATIONS_MAX])
    elif detail.Unpack(retry):
        error.retry_delay_s = min(
            max(retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9, 0.0), RETRY_DELAY_MAX_S
        )
