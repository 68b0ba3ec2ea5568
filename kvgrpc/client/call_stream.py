"""Sends unary calls over one stream (CallService.StreamCalls), for about half of what each costs by itself.

A stream that cannot be used is no error: the call is then made as a unary RPC. The same holds if the stream ends before
the answer, or if the answer is UNAVAILABLE: gRPC retries the unary RPC like any call (`channel`), within the time left.
The call acts at most once, because it keeps its idempotency key.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc import aio

from kvgrpc.client import pauses
from kvgrpc.client.grpc_status import error_of
from kvgrpc.client.values import duration
from kvgrpc.errors import KVGrpcError
from kvgrpc.v1 import calls_pb2, handoff_pb2, lease_pb2, pool_pb2, transfer_pb2
from kvgrpc.v1.calls_pb2_grpc import CallServiceStub

OFTEN = frozenset(
    {
        *("FinishedBlocks", "PullBlocks", "ReserveBlocks", "RegisterPush"),
        *("GetTransfer", "WaitTransfer", "WaitTransfers", "AcknowledgeTransfers", "CancelTransfer"),
        *("GrantLease", "RenewLeases", "ReleaseLease", "AllocateBlocks", "FreeBlocks"),
    }
)
"""Methods called for every request. The long replies of other methods would delay the answers of these."""
IDLE_S = 20.0
"""Idle time in seconds. Two calls closer together than this open the stream, and a gap this long ends it: gRPC pings an
idle stream, and some servers and proxies reject that.
"""
RETRY_S = 1.0
"""Pause between the end of a broken stream and the next attempt, in seconds."""
UNKNOWN_RETRY_S = 60.0
"""Pause before the next attempt if the server does not know StreamCalls, in seconds: by then a newer server may run
there.
"""
CALLS_MAX = 512
"""Maximum number of calls in flight over the stream, half of what a server allows a connection. Others are unary
RPCs.
"""
MESSAGE_BYTES = 1 << 20
"""Maximum size of a request that goes over the stream, and of the requests that one message carries, in bytes."""


@dataclass(frozen=True)
class _UnaryMethod:
    path: str
    reply: type[Message]


_METHODS: Mapping[str, _UnaryMethod] = {
    method.input_type.full_name: _UnaryMethod(f"{service.full_name}/{method.name}", GetMessageClass(method.output_type))
    for file in (handoff_pb2, lease_pb2, pool_pb2, transfer_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.name in OFTEN
}
"""Methods by the full name of their request message. Every method has a request message of its own."""


class _BrokenError(Exception):
    """The stream ended before the answer."""


class _ClosedError(Exception):
    """The client was closed before the answer."""


@dataclass(eq=False)
class _CallInFlight:
    """A call in flight."""

    answer: "asyncio.Future[calls_pb2.UnaryAnswer | None]"
    """The answer; None once the call's time is over."""
    received: int
    """Number of messages that the stream had received when the call was made."""


class CallStream:
    """The stream to one server, in one event loop. `metadata` returns the client's own, which holds for every call of
    the stream.
    """

    def __init__(self, channel: aio.Channel, address: str, metadata: Callable[[], tuple[tuple[str, str], ...]]) -> None:
        self._channel, self._address, self._metadata = channel, address, metadata
        self._task: asyncio.Task[None] | None = None
        self._usable = False
        self._closed = False
        self._retry_at = 0.0
        self._called_at = -IDLE_S
        self._received = 0
        self._last_id = 0
        self._waiting: dict[int, _CallInFlight] = {}
        self._unsent: list[calls_pb2.UnaryCall] = []
        self._given_up: list[int] = []
        self._wake: asyncio.Future[None] | None = None

    async def reply(self, request: Message, timeout_s: float, traceparent: str) -> Message | None:
        """Returns the server's reply, or None if the caller must make the call as a unary RPC. Raises KVGrpcError."""
        method = _METHODS.get(request.DESCRIPTOR.full_name)
        if method is None or not self._ready():
            return None
        body = request.SerializeToString()
        if len(body) > MESSAGE_BYTES:
            return None
        until = _now() + timeout_s
        call = calls_pb2.UnaryCall(method=method.path, request=body, traceparent=traceparent)
        call.timeout.CopyFrom(duration(timeout_s))
        try:
            answer = await self._answer(call, timeout_s)
        except _BrokenError:
            return None
        except _ClosedError:
            raise self._error(grpc.StatusCode.CANCELLED, "the client was closed", method) from None
        if answer is None:
            raise self._error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", method)
        if answer.WhichOneof("answer") == "error":
            if answer.error.code == grpc.StatusCode.UNAVAILABLE.value[0]:
                await asyncio.sleep(max(min(pauses.growing(1), until - _now()), 0.0))
                return None
            raise error_of(answer.error, _name(method), self._address)
        try:
            return method.reply.FromString(answer.reply)
        except DecodeError:
            raise self._error(grpc.StatusCode.INTERNAL, "the reply cannot be read", method) from None

    async def close(self) -> None:
        """Ends the stream and the calls in flight."""
        self._closed = True
        self._fail_all(_ClosedError())
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def _error(self, code: grpc.StatusCode, message: str, method: _UnaryMethod) -> KVGrpcError:
        status = calls_pb2.CallStatus(code=code.value[0], message=message)
        return error_of(status, _name(method), self._address)

    def _ready(self) -> bool:
        """Returns True if a call may go over the stream. Opens the stream for later calls if calls are frequent."""
        now = _now()
        often, self._called_at = now - self._called_at < IDLE_S, now
        if self._usable:
            return len(self._waiting) < CALLS_MAX
        if self._task is None and often and now >= self._retry_at and not self._closed:
            self._task = asyncio.create_task(self._run())
        return False

    async def _answer(self, call: calls_pb2.UnaryCall, timeout_s: float) -> calls_pb2.UnaryAnswer | None:
        """Returns the answer, or None once the call's time is over. Raises _BrokenError or _ClosedError."""
        loop = asyncio.get_running_loop()
        self._last_id = call.call_id = self._last_id + 1
        waiting = self._waiting[call.call_id] = _CallInFlight(loop.create_future(), self._received)
        self._unsent.append(call)
        self._wake_writer()
        timer = loop.call_later(timeout_s, self._late, call.call_id)
        try:
            return await waiting.answer
        finally:
            timer.cancel()
            if self._waiting.pop(call.call_id, None) is not None:  # its caller was cancelled
                self._give_up(call.call_id)

    def _late(self, call_id: int) -> None:
        waiting = self._waiting.pop(call_id, None)
        if waiting is None:
            return
        if not waiting.answer.done():
            waiting.answer.set_result(None)
        if waiting.received == self._received and self._task is not None:
            self._task.cancel()  # nothing came all the while: the server may be gone
        else:
            self._give_up(call_id)

    def _give_up(self, call_id: int) -> None:
        """Tells the server to drop a call."""
        self._given_up.append(call_id)
        self._wake_writer()

    async def _run(self) -> None:
        retry_s = RETRY_S
        writer = stream = None
        try:
            stream = CallServiceStub(self._channel).StreamCalls(metadata=self._metadata())
            # A proxy may accept messages and forward none: an empty exchange proves that both directions work.
            await stream.write(calls_pb2.StreamCallsRequest())
            if isinstance(await stream.read(), calls_pb2.StreamCallsResponse):
                self._usable = True
                writer = asyncio.create_task(self._write(stream))
            while isinstance(message := await stream.read(), calls_pb2.StreamCallsResponse):
                self._received += 1
                for answer in message.answers:
                    self._take(answer)
        except aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                retry_s = UNKNOWN_RETRY_S
        except (asyncio.InvalidStateError, aio.UsageError):
            pass  # the call was over before it began
        finally:
            self._usable, self._task = False, None
            self._retry_at = _now() + retry_s
            if writer is not None:
                writer.cancel()
            if stream is not None:
                stream.cancel()
            self._fail_all(_BrokenError())

    def _take(self, answer: calls_pb2.UnaryAnswer) -> None:
        waiting = self._waiting.pop(answer.call_id, None)
        if waiting is not None and not waiting.answer.done():
            waiting.answer.set_result(answer)

    def _fail_all(self, why: Exception) -> None:
        waiting, self._waiting = self._waiting, {}
        self._unsent.clear()
        self._given_up.clear()
        for one in waiting.values():
            if not one.answer.done():
                one.answer.set_exception(why)

    async def _write(self, stream: Any) -> None:
        # An error that ends a write ends the read, too, and the read reports it.
        with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
            while self._usable:
                if self._unsent or self._given_up:
                    await stream.write(self._next_message())
                else:
                    await self._wait_for_calls()
            await stream.done_writing()

    async def _wait_for_calls(self) -> None:
        """Returns once there are calls to send. Makes the stream unusable if no call was made for IDLE_S."""
        loop = asyncio.get_running_loop()
        self._wake = loop.create_future()
        idle = loop.call_later(IDLE_S, self._wake_writer)
        try:
            await self._wake
        finally:
            idle.cancel()
        if not (self._unsent or self._given_up or self._waiting) and _now() - self._called_at >= IDLE_S:
            self._usable = False

    def _wake_writer(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _next_message(self) -> calls_pb2.StreamCallsRequest:
        """Returns the next message: the first unsent calls, in order, up to MESSAGE_BYTES."""
        message, nbytes = calls_pb2.StreamCallsRequest(cancelled_call_ids=self._given_up), 0
        self._given_up.clear()
        for call in self._unsent:
            nbytes += len(call.request)
            if message.calls and nbytes > MESSAGE_BYTES:
                break
            message.calls.add().CopyFrom(call)  # append would serialize and parse it again
        del self._unsent[: len(message.calls)]
        return message


def _now() -> float:
    return asyncio.get_running_loop().time()


def _name(method: _UnaryMethod) -> str:
    return method.path.rpartition("/")[2]
