"""Converts gRPC statuses to the errors of kvgrpc.

The details travel as google.rpc messages in trailing metadata. The base install has no classes for them, and a client
must not behave differently if googleapis-common-protos happens to be installed. Hence the few fields are read by their
numbers: those messages are frozen, and a message class without fields keeps every field as an unknown one.
"""

from collections import defaultdict
from collections.abc import Iterator

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from grpc import aio

from kvgrpc.errors import (
    BY_CODE,
    LATE_WRITE,
    DeadlineExceeded,
    Exhausted,
    FieldViolation,
    InternalError,
    KVGrpcError,
    NextStep,
    PermissionDenied,
    Reason,
    Unavailable,
    said_once,
)
from kvgrpc.v1.calls_pb2 import CallStatus

DETAILS_KEY = "grpc-status-details-bin"
DOMAIN = "kvgrpc.dev"
TOO_LARGE = "larger than max"
"""Part of gRPC's own error message, in every language, for a message larger than its reader's limit. Its code,
RESOURCE_EXHAUSTED, is otherwise transient, but this error is not.
"""
_LENGTH_DELIMITED = 2
INCARNATION_DIGITS = 20
"""Number of digits of the largest 64-bit number."""

# Codes that kvgrpc itself never sends, but that gRPC, proxies and ending servers do.
_FOREIGN: dict[str, type[KVGrpcError]] = {
    "CANCELLED": Unavailable,  # not cancelled by us: then the call raises asyncio.CancelledError
    "UNAUTHENTICATED": PermissionDenied,
    "UNKNOWN": InternalError,
}

_BY_NUMBER = {grpc.StatusCode[name].value[0]: kind for name, kind in BY_CODE.items()}

# Reasons for statuses that name none, because no kvgrpc server made them.
_REASONS = {
    "CANCELLED": Reason.PEER_UNREACHABLE,
    "DEADLINE_EXCEEDED": Reason.DEADLINE,
    "INVALID_ARGUMENT": Reason.INVALID_FIELD,
    "RESOURCE_EXHAUSTED": Reason.LIMIT_EXCEEDED,
    "UNAVAILABLE": Reason.PEER_UNREACHABLE,
    "UNIMPLEMENTED": Reason.FEATURE_UNAVAILABLE,
}


def kind_of(number: int) -> type[KVGrpcError]:
    """Returns the error class of a gRPC status code that a message names by its number."""
    return _BY_NUMBER.get(number, InternalError)


_CODES = {code.value[0]: code for code in grpc.StatusCode}


def to_error(failed: aio.AioRpcError, method: str, address: str) -> KVGrpcError:
    """Returns the typed error of a failed call. The error's `metadata` always names the method and the address."""
    code, message = failed.code(), failed.details()
    if code is grpc.StatusCode.INTERNAL and message == LATE_WRITE:
        code, message = grpc.StatusCode.UNAVAILABLE, "the server had ended the stream"
    return _error(code, message, dict(_details(failed)), method, address)


def error_of(status: CallStatus, method: str, address: str) -> KVGrpcError:
    """Returns the typed error of a call over a stream of calls."""
    details = {detail.type_url.rpartition("/")[2]: detail.value for detail in status.details}
    return _error(_CODES.get(status.code, grpc.StatusCode.UNKNOWN), status.message, details, method, address)


def _error(
    code: grpc.StatusCode, message: str | None, details: dict[str, bytes], method: str, address: str
) -> KVGrpcError:
    info = _fields(details.get("google.rpc.ErrorInfo", b""))
    metadata = {"method": method, "address": address, **dict(_metadata(info))}
    reason = _reason(code, info, metadata)
    message = message or code.name
    if not info:
        message = f"{method} at {address}: {message}"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        metadata.setdefault("phase", "call")
    violations = tuple(_violations(details.get("google.rpc.BadRequest", b"")))
    kind = BY_CODE.get(code.name) or _FOREIGN.get(code.name, InternalError)
    error = kind(
        reason,
        said_once(message, reason, violations),
        violations=violations,
        retry_delay_s=_retry_delay_s(details.get("google.rpc.RetryInfo", b"")),
        metadata=metadata,
    )
    if _text(info, 2) == DOMAIN:
        # If the reason is unknown to this version, the next step must not be taken, whatever it is.
        error.next = _next(metadata.get("next", "")) if _text(info, 1) in Reason.__members__ else None
        error.engine_id = metadata.get("engine_id", "")
        error.incarnation = _incarnation(metadata.get("incarnation", ""))
    return error


def not_connected(error: Unavailable, why: str) -> Unavailable:
    """Returns the error of a call whose connection TLS prevents. Its metadata has the cause as `tls`."""
    where = f"{error.metadata['method']} at {error.metadata['address']}"
    said = error.message.removeprefix(f"{where}: ")
    return Unavailable(error.reason, f"{where}: {why} (gRPC: {said})", metadata={**error.metadata, "tls": why})


def not_begun(failed: aio.AioRpcError) -> bool:
    """Returns True if a server may have received a call and not begun it when it ended: gRPC ends such a call with
    CANCELLED and no reason.
    """
    return failed.code() is grpc.StatusCode.CANCELLED and "google.rpc.ErrorInfo" not in dict(_details(failed))


def passes(error: KVGrpcError) -> bool:
    """Returns True if a wait or a watch goes on after an error: its server is unreachable, silent or full, or an
    intermediary that is no kvgrpc server failed, which says nothing of the transfer.
    """
    if isinstance(error, Exhausted):
        return TOO_LARGE not in error.message
    if isinstance(error, Unavailable | DeadlineExceeded):
        return True
    return isinstance(error, InternalError) and error.reason is Reason.INTERNAL and not error.engine_id


def _details(failed: aio.AioRpcError) -> Iterator[tuple[str, bytes]]:
    """Yields (type, bytes) of each detail; nothing if there are none or they cannot be read."""
    for key, value in failed.trailing_metadata() or ():
        if key != DETAILS_KEY or not isinstance(value, bytes):
            continue
        for row in _fields(value).get(3, ()):  # google.rpc.Status.details
            try:
                detail = AnyMessage.FromString(row)
            except DecodeError:
                continue
            yield detail.type_url.rpartition("/")[2], detail.value


def _metadata(info: dict[int, list[bytes]]) -> Iterator[tuple[str, str]]:
    for row in info.get(3, ()):  # google.rpc.ErrorInfo.metadata
        entry = _fields(row)
        yield _text(entry, 1), _text(entry, 2)


def _reason(code: grpc.StatusCode, info: dict[int, list[bytes]], metadata: dict[str, str]) -> Reason:
    """Returns the reason. One that this version does not know is INTERNAL, with its name in `metadata`."""
    if not info:
        return _REASONS.get(code.name, Reason.INTERNAL)
    name, domain = _text(info, 1), _text(info, 2)
    if domain == DOMAIN and name in Reason.__members__:
        return Reason[name]
    metadata.update(reason=name, domain=domain)
    return Reason.INTERNAL


def _next(name: str) -> NextStep | None:
    """Returns the next step. One that this version does not know is None: it must not be retried by machine."""
    return NextStep[name] if name in NextStep.__members__ else None


def _incarnation(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= INCARNATION_DIGITS else 0


def _violations(bad_request: bytes) -> Iterator[FieldViolation]:
    for row in _fields(bad_request).get(1, ()):  # google.rpc.BadRequest.field_violations
        violation = _fields(row)
        yield FieldViolation(_text(violation, 1), _text(violation, 2))


def _retry_delay_s(retry_info: bytes) -> float | None:
    for row in _fields(retry_info).get(1, ()):  # google.rpc.RetryInfo.retry_delay
        try:
            return Duration.FromString(row).ToNanoseconds() / 1e9
        except DecodeError:
            return None
    return None


def _text(fields: dict[int, list[bytes]], number: int) -> str:
    return fields[number][-1].decode(errors="replace") if number in fields else ""


def _fields(data: bytes) -> dict[int, list[bytes]]:
    """Returns the strings, bytes and messages of an encoded message, by field number; empty if it is malformed."""
    found: defaultdict[int, list[bytes]] = defaultdict(list)
    try:
        message = Empty.FromString(data)
    except DecodeError:
        return found
    unknown = UnknownFieldSet(message)
    for field in (unknown[i] for i in range(len(unknown))):
        if field.wire_type == _LENGTH_DELIMITED:
            found[field.field_number].append(field.data)
    return found
