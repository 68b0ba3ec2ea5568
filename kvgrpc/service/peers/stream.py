"""Calls to another lead over one stream (PeerService.Converse), at about half the cost of unary calls.

A stream that cannot be used is no error: the call is then made as a unary one. A stream that breaks answers every call
that waits on it with Unavailable; all of these calls may be retried.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from kvgrpc.errors import InternalError, KVGrpcError, Reason, Unavailable
from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.service.peers.errors import readable
from kvgrpc.wire.bounds import CALLS_MAX, check_count
from kvgrpc.wire.values import stated_error

_log = logging.getLogger(__name__)

Answered = Callable[[Any | KVGrpcError], None]
"""Callback that gets the response message, or the error."""
RETRY_S = 1.0
"""Wait between two tries to open the stream, in seconds."""
SWEEP_S = 0.5
"""Maximum delay until the deadline of a call is noticed, in seconds."""
MESSAGE_BYTES = 1 << 20
"""Maximum size of calls that go out together, in bytes. One call may be longer; too long a message ends the stream."""


@dataclass(eq=False)
class _Waiting:
    kind: str
    deadline: float
    answered: Answered


class PeerStream:
    """The stream to one lead. `peer` names it in errors; `caller` is the calling life, with its proof."""

    def __init__(self, stub: Any, peer: str, caller: peer_pb2.Caller) -> None:
        self._stub = stub
        self._caller = caller
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._retry_at: float | None = 0.0
        self._waiting: dict[int, _Waiting] = {}
        self._last_id = 0
        self._unsent: list[peer_pb2.PeerCall] = []
        self._wake: asyncio.Future[None] | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._empty: asyncio.Future[None] | None = None
        self.usable = False

    def start(self) -> None:
        """Opens the stream, unless it is opening, has just failed, or the peer does not know the method."""
        if self._task is None and self._retry_at is not None and self._loop.time() >= self._retry_at:
            self._task = asyncio.create_task(self._run())

    def call(self, call: peer_pb2.PeerCall, timeout_s: float, answered: Answered) -> None:
        """Sends a call. Call it only while `usable`."""
        self._last_id += 1
        call.call_id = self._last_id
        kind = call.WhichOneof("call")
        assert kind is not None
        self._waiting[call.call_id] = _Waiting(kind, self._loop.time() + timeout_s, answered)
        self._unsent.append(call)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)

    async def close(self, grace_s: float) -> None:
        """Lets calls in flight be answered for `grace_s` seconds, then ends the stream."""
        self._retry_at = None
        if self._waiting:
            self._empty = self._loop.create_future()
            await asyncio.wait((self._empty,), timeout=grace_s)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        stream = self._stub.Converse()
        writer = None
        broke: KVGrpcError = Unavailable(Reason.PEER_UNREACHABLE, f"the stream to {self._peer} broke")
        try:
            await stream.initial_metadata()
            if not stream.done():
                self.usable = True
                writer = asyncio.create_task(self._write(stream))
            while (message := await stream.read()) is not grpc.aio.EOF:
                rows = readable(message, self._peer).answers
                check_count("answers", len(rows), CALLS_MAX)
                for answer in rows:
                    self._answer(answer)
                    del answer
                del message, rows  # frees them now: the next message may come much later
            _log.debug("peer %s ended the conversation", self._peer)
            self._retry_at = self._after_end()
        except grpc.aio.AioRpcError as error:
            # A peer of an earlier version lacks this method: only unary calls reach it.
            known = error.code() is not grpc.StatusCode.UNIMPLEMENTED
            self._retry_at = self._after_end() if known else None
        except KVGrpcError as error:
            self._retry_at, broke = self._after_end(), error.untraced()
        finally:
            self.usable = False
            self._task = None
            if writer is not None:
                writer.cancel()
            stream.cancel()
            self._fail_all(broke)

    def _after_end(self) -> float | None:
        return None if self._retry_at is None else self._loop.time() + RETRY_S

    async def _write(self, stream: Any) -> None:
        # An error that ends a write ends the read too, and the read reports it.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await stream.write(peer_pb2.ConverseRequest(caller=self._caller))
            while True:
                if not self._unsent:
                    self._wake = self._loop.create_future()
                    await self._wake
                await stream.write(self._next_message())

    def _next_message(self) -> peer_pb2.ConverseRequest:
        """Returns the next message: unsent calls in their order, as many as fit."""
        message, nbytes = peer_pb2.ConverseRequest(), 0
        for call in self._unsent:
            nbytes += call.ByteSize()
            if message.calls and (nbytes > MESSAGE_BYTES or len(message.calls) == CALLS_MAX):
                break
            message.calls.add().CopyFrom(call)  # append would serialize it and parse it again
        del self._unsent[: len(message.calls)]
        return message

    def _answer(self, answer: peer_pb2.PeerAnswer) -> None:
        waiting = self._waiting.pop(answer.call_id, None)
        if waiting is None:
            return  # answered too late
        kind = answer.WhichOneof("answer")
        if kind == "error":
            error = answer.error
            waiting.answered(stated_error(error.code, error.reason, error.message))
        elif kind == waiting.kind:
            waiting.answered(getattr(answer, kind))
        else:
            what = f"the peer answered {waiting.kind} with {kind or 'nothing'}"
            waiting.answered(InternalError(Reason.PEER_FAILED, what))
        self._note_empty()

    def _sweep(self) -> None:
        """Ends the calls whose deadline has passed."""
        self._sweeper = None
        now = self._loop.time()
        for call_id in [id_ for id_, waiting in self._waiting.items() if waiting.deadline <= now]:
            waiting = self._waiting.pop(call_id)
            error = Unavailable(Reason.PEER_UNREACHABLE, f"{self._peer} did not answer {waiting.kind} in time")
            waiting.answered(error)
        if self._waiting and self._sweeper is None:
            self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
        self._note_empty()

    def _fail_all(self, error: KVGrpcError) -> None:
        waiting, self._waiting = self._waiting, {}
        self._unsent.clear()
        for one in waiting.values():
            one.answered(error)
        self._note_empty()

    def _note_empty(self) -> None:
        if self._empty is not None and not self._waiting and not self._empty.done():
            self._empty.set_result(None)
