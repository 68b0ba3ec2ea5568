"""Typed errors for calls to other leads that brought no answer, or an answer that cannot be read."""

import logging
from typing import Any

import grpc
import grpc.aio

from kvgrpc.errors import LATE_WRITE, DeadlineExceeded, InternalError, KVGrpcError, Reason, Unavailable
from kvgrpc.service import grpc_status
from kvgrpc.v1 import calls_pb2
from kvgrpc.wire import fields

_log = logging.getLogger(__name__)


def readable(reply: Any, who: str) -> Any:
    """Returns a reply. Raises InternalError (PEER_FAILED) for an unparsable one, which gRPC gives as None."""
    if reply is None:
        raise InternalError(Reason.PEER_FAILED, f"{who} answered something that cannot be read")
    return reply


def bounded(reply: Any, who: str) -> Any:
    """Returns a reply whose fields are within their bounds. Raises InternalError (PEER_FAILED) for one that is not, or
    that cannot be read.
    """
    try:
        fields.check(readable(reply, who))
    except KVGrpcError as error:
        raise InternalError(Reason.PEER_FAILED, f"the answer of {who} holds more than it may: {error}") from error
    return reply


def stated(error: calls_pb2.CallStatus, who: str) -> KVGrpcError:
    """Returns the typed error that a peer answered to a call on a stream."""
    try:
        return grpc_status.from_call_status(bounded(error, who))
    except KVGrpcError as unreadable:
        return unreadable.untraced()


def failure_of(error: Exception, what: str) -> KVGrpcError:
    """Returns the typed error of `what`; it refers to no answer. Errors that no peer sent are defects of this lead."""
    match error:
        case KVGrpcError():
            return error.untraced()
        case grpc.aio.AioRpcError():
            return _call_failure(error, what)
        case grpc.aio.UsageError() | grpc.aio.InternalError():  # gRPC's own, for a channel that closes as a call begins
            return Unavailable(Reason.PEER_UNREACHABLE, f"{what} was not sent: the connection closed")
        case TimeoutError():
            return Unavailable(Reason.PEER_UNREACHABLE, f"{what} was not answered in time")
    _log.error("%s failed", what, exc_info=error)
    return InternalError(Reason.INTERNAL, f"a defect of kvgrpc: {error!r}")


def _call_failure(error: grpc.aio.AioRpcError, what: str) -> KVGrpcError:
    if _wrote_late(error):
        return Unavailable(Reason.PEER_UNREACHABLE, f"{what} was cut off: the peer ended it")
    typed = grpc_status.from_rpc_error(error)
    if isinstance(typed, DeadlineExceeded) and typed.reason is Reason.PEER_UNREACHABLE:  # gRPC's own: no peer says that
        return Unavailable(Reason.PEER_UNREACHABLE, f"{what} was not answered in time")
    return typed


def dial_failure(address: str, error: Exception) -> KVGrpcError:
    """Returns the typed error of a failed handshake."""
    typed = failure_of(error, f"the handshake with {address}")
    refused = isinstance(error, grpc.aio.AioRpcError) and not _wrote_late(error)
    if refused and isinstance(typed, Unavailable) and typed.reason is Reason.PEER_UNREACHABLE:
        return Unavailable(Reason.PEER_UNREACHABLE, f"no kvgrpc server answers at {address}: {typed.message}")
    return typed


def _wrote_late(error: grpc.aio.AioRpcError) -> bool:
    return error.code() is grpc.StatusCode.INTERNAL and error.details() == LATE_WRITE


def wants_proof(result: object) -> bool:
    """Returns whether a peer refused the proof it was shown: after another handshake the call is made again."""
    return isinstance(result, KVGrpcError) and result.reason is Reason.NOT_PROVED
