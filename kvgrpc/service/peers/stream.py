"""Calls to another lead over one stream (PeerService.Converse).

The first call opens the stream, and so does the first call after its end. A stream that ends answers every call that
waits on it with Unavailable: the caller does not know what became of them. All calls but PostSend may be made again.

A call to another lead that brought no answer, or an answer that cannot be read, has a typed error, here or over another
way.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from kvgrpc.core.values.limits import MESSAGE_BYTES
from kvgrpc.errors import (
    LATE_WRITE,
    DeadlineExceeded,
    InternalError,
    KVGrpcError,
    OutOfRange,
    Reason,
    Unavailable,
    Unimplemented,
)
from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.service import grpc_status
from kvgrpc.v1 import calls_pb2
from kvgrpc.wire import fields
from kvgrpc.wire.accesses import CALLS
from kvgrpc.wire.bounds import CALLS_MAX, check_count
from kvgrpc.wire.values import duration

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
    if reply is None:
        return readable(reply, who)
    try:
        fields.check(reply)
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


Answered = Callable[[Any | KVGrpcError], None]
"""Callback that gets the response message, or the error."""
SWEEP_S = 0.5
"""Maximum delay until the deadline of a call is noticed, in seconds."""
TOGETHER_BYTES = 1 << 20
"""Maximum size of calls that go out together, in bytes. One call may be longer."""
ENVELOPE_BYTES = 1_024
"""Upper bound of what a stream adds to a call, in bytes."""


@dataclass(eq=False)
class _UnansweredCall:
    kind: str
    deadline: float
    answered: Answered


class PeerStream:
    """The stream to one lead. `peer` names it in errors; `caller` is the calling life, with its proof.
    `message_bytes`: maximum size of a message to that lead.
    """

    def __init__(self, stub: Any, peer: str, caller: peer_pb2.Caller, message_bytes: int = MESSAGE_BYTES) -> None:
        self._stub = stub
        self._caller = caller
        self._peer = peer
        self.message_bytes = message_bytes
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._waiting: dict[int, _UnansweredCall] = {}
        self._last_id = 0
        self._unsent: dict[int, peer_pb2.PeerCall] = {}
        """Calls that are not sent yet, by their ids, in their order."""
        self._wake: asyncio.Future[None] | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._empty: asyncio.Future[None] | None = None

    def call(self, call: peer_pb2.PeerCall, timeout_s: float, answered: Answered) -> None:
        """Makes a call, at once or as soon as the stream is open. A call that is too long is answered with OutOfRange:
        over the stream it would end all other calls.
        """
        kind = call.WhichOneof("call")
        assert kind is not None
        nbytes, most = call.ByteSize(), self.message_bytes - ENVELOPE_BYTES
        if nbytes > most:
            what = f"{CALLS[kind]} would have {nbytes} bytes; the limit of {self._peer} is {most}"
            answered(OutOfRange(Reason.LIMIT_EXCEEDED, what))
            return
        self._last_id += 1
        call.call_id = self._last_id
        call.timeout.CopyFrom(duration(timeout_s))
        self._waiting[call.call_id] = _UnansweredCall(kind, self._loop.time() + timeout_s, answered)
        self._unsent[call.call_id] = call
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def close(self, grace_s: float) -> None:
        """Lets calls in flight be answered for `grace_s` seconds, then ends the stream."""
        try:
            if self._waiting:
                self._empty = self._loop.create_future()
                await asyncio.wait((self._empty,), timeout=grace_s)
        finally:
            if self._task is not None:
                self._task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await self._task

    async def _run(self) -> None:
        """Runs one stream from its opening to its end, which ends all calls that wait."""
        writer = stream = None
        broke: KVGrpcError = Unavailable(Reason.PEER_UNREACHABLE, f"the stream to {self._peer} is over")
        try:
            stream = self._stub.Converse()
            writer = asyncio.create_task(self._write(stream))
            while (message := await stream.read()) is not grpc.aio.EOF:
                rows = readable(message, self._peer).answers
                check_count("answers", len(rows), CALLS_MAX)
                for answer in rows:
                    self._answer(answer)
                    del answer
                del message, rows  # frees them now: the next message may come much later
        except Exception as error:  # noqa: BLE001 - every call gets an answer in any case
            broke = self._ended_by(error)
        finally:
            self._task = None
            if writer is not None:
                writer.cancel()
            if stream is not None:
                stream.cancel()
            self._fail_all(broke)

    def _ended_by(self, error: Exception) -> KVGrpcError:
        """Returns the error of the calls that waited on a stream that this error ended."""
        found = failure_of(error, f"the stream to {self._peer}")
        if isinstance(error, grpc.aio.AioRpcError) and not isinstance(found, Unavailable | Unimplemented):
            # The status is one of the stream and says nothing about its calls.
            return Unavailable(Reason.PEER_UNREACHABLE, f"the stream to {self._peer} broke: {found.message}")
        return found

    async def _write(self, stream: Any) -> None:
        # An error that ends a write ends the read too, and the read reports it.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await stream.wait_for_connection()  # what is given up until then is not sent
            await stream.write(self._next_message(self._caller))
            while True:
                if not self._unsent:
                    self._wake = self._loop.create_future()
                    await self._wake
                await stream.write(self._next_message())

    def _next_message(self, caller: peer_pb2.Caller | None = None) -> peer_pb2.ConverseRequest:
        """Returns the next message: unsent calls in their order, as many as fit."""
        message, nbytes = peer_pb2.ConverseRequest(caller=caller), 0
        most = min(TOGETHER_BYTES, self.message_bytes - ENVELOPE_BYTES)
        for call in self._unsent.values():
            nbytes += call.ByteSize()
            if message.calls and (nbytes > most or len(message.calls) == CALLS_MAX):
                break
            message.calls.add().CopyFrom(call)  # append would serialize it and parse it again
        for call in message.calls:
            del self._unsent[call.call_id]
        return message

    def _answer(self, answer: peer_pb2.PeerAnswer) -> None:
        waiting = self._waiting.pop(answer.call_id, None)
        if waiting is None:
            return  # answered too late
        kind = answer.WhichOneof("answer")
        if kind == "error":
            waiting.answered(stated(answer.error, self._peer))
        elif kind == waiting.kind:
            waiting.answered(getattr(answer, kind))
        else:
            what = f"the peer answered {CALLS[waiting.kind]} with {kind or 'nothing'}"
            waiting.answered(InternalError(Reason.PEER_FAILED, what))
        if self._empty is not None:
            self._note_empty(self._empty)

    def _sweep(self) -> None:
        """Ends the calls whose deadline has passed."""
        self._sweeper = None
        now = self._loop.time()
        for call_id in [id_ for id_, waiting in self._waiting.items() if waiting.deadline <= now]:
            waiting = self._waiting.pop(call_id)
            self._unsent.pop(call_id, None)
            what = f"{self._peer} did not answer {CALLS[waiting.kind]} in time"
            waiting.answered(Unavailable(Reason.PEER_UNREACHABLE, what))
        if self._waiting and self._sweeper is None:
            self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
        if self._empty is not None:
            self._note_empty(self._empty)

    def _fail_all(self, error: KVGrpcError) -> None:
        waiting, self._waiting = self._waiting, {}
        self._unsent.clear()
        for one in waiting.values():
            one.answered(error)
        if self._empty is not None:
            self._note_empty(self._empty)

    def _note_empty(self, empty: asyncio.Future[None]) -> None:
        if not self._waiting and not empty.done():
            empty.set_result(None)
