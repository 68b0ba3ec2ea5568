"""CallService: unary calls over one stream.

The handler that serves a call by itself also serves it here, with its place, the check of its request, its span and its
typed errors. This file reads the calls, runs each in a task, and sends the answers.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NoReturn

import grpc
import grpc.aio

from kvgrpc.errors import DeadlineExceeded, InternalError, KVGrpcError, Reason, Unimplemented, invalid, too_many
from kvgrpc.service import grpc_status, telemetry
from kvgrpc.service.callers import Metadata, payer
from kvgrpc.service.identity.gate import CALLER, KnownCaller
from kvgrpc.service.lead import Lead
from kvgrpc.service.open_streams import OverError, StreamAnswers
from kvgrpc.service.rpc.method import check_request
from kvgrpc.service.span_makers import TRACEPARENT
from kvgrpc.v1 import calls_pb2, calls_pb2_grpc
from kvgrpc.wire.answers import readable_trace
from kvgrpc.wire.values import seconds

_log = logging.getLogger(__name__)

CALLS_A_TURN = 16
"""Number of calls to begin before the event loop runs other work: a message may have thousands."""
CROWD = 64
"""Number of unanswered calls of a stream from which it counts among the callers with many calls."""
LAST_ANSWERS_S = 0.5
"""Maximum wait for open calls when the server ends, in seconds: their transfers have ended, so answers come soon."""


class CallService(calls_pb2_grpc.CallServiceServicer):
    """Serves streams of calls. `unary`: the handlers of all unary methods, by name."""

    def __init__(self, lead: Lead, unary: Mapping[str, Any], message_bytes: int) -> None:
        self._lead = lead
        self._unary = unary
        self._message_bytes = message_bytes

    async def StreamCalls(self, request_iterator: object, context: Any) -> None:  # type: ignore[override]
        """Serves one stream, which writes each answer when it is known."""
        try:
            with self._lead.standing.one():
                await ServedCallStream(self._lead, self._unary, context, self._message_bytes).run()
        except KVGrpcError as error:
            await grpc_status.abort(context, error, self._lead.header())
        finally:
            del context  # the context keeps the error that ends its call, and the error keeps this frame


class ServedCallStream:
    """One stream of one client."""

    def __init__(self, lead: Lead, unary: Mapping[str, Any], context: Any, message_bytes: int) -> None:
        self._lead = lead
        self._unary = unary
        self._context = context
        self._answers = StreamAnswers(context, calls_pb2.StreamCallsResponse, message_bytes)
        self._served: dict[int, asyncio.Task[None]] = {}
        self._last_id = 0
        self._came_at = 0.0
        """Time at which the last message came, on the clock of `time.perf_counter`."""

    async def run(self) -> None:
        """Serves until the client ends the stream and its last call is answered. Raises InvalidRequest."""
        await self._context.send_initial_metadata(())  # tells the client that this server knows the method
        try:
            await self._serve_all()
        except OverError:
            await self._settle(LAST_ANSWERS_S)
        finally:
            self._answers.close()
            for task in self._served.values():
                task.cancel()

    async def _serve_all(self) -> None:
        standing = self._lead.standing
        while (message := await standing.read(self._context.read)) is not grpc.aio.EOF:
            check_request(message)
            telemetry.CAME_AT.set(0.0)
            self._came_at = time.perf_counter()
            await self._enter(len(message.calls))
            self._answers.more = True
            await self._begin(message.calls)
            self._give_up(message.cancelled_call_ids)
            if not message.calls and not message.cancelled_call_ids:
                self._answers.add_empty()
            del message  # frees it now: the next message may come much later
            await asyncio.sleep(0)  # lets the calls run: most are answered without a wait
            self._answers.more = False
            await self._answers.write()
        await standing.read(self._settle)

    async def _settle(self, timeout_s: float | None = None) -> None:
        """Waits for the unanswered calls, at most `timeout_s`, and sends the answers known by then."""
        if self._served:
            await asyncio.wait(list(self._served.values()), timeout=timeout_s)
        await self._answers.write()

    async def _begin(self, calls: Iterable[calls_pb2.UnaryCall]) -> None:
        """Starts a task for each call, in order, and lets other work run in between."""
        for count, call in enumerate(calls, 1):
            if call.call_id <= self._last_id:
                raise invalid("calls.call_id", f"is greater than those before it: {call.call_id}, {self._last_id}")
            self._last_id = call.call_id
            task = asyncio.create_task(self._serve(call))
            self._served[call.call_id] = task
            task.add_done_callback(partial(self._over, call.call_id))
            if count % CALLS_A_TURN == 0:
                await asyncio.sleep(0)
                await self._enter(0)

    async def _enter(self, calls: int) -> None:
        """Waits until a message of so many calls may begin, if the stream has many."""
        if len(self._served) + calls > CROWD:
            self._lead.call_queue.crowd()
            if await self._lead.call_queue.enter(payer(), patient=True):
                telemetry.CAME_AT.set(self._came_at)

    def _give_up(self, call_ids: Iterable[int]) -> None:
        for call_id in call_ids:
            task = self._served.get(call_id)
            if task is not None:
                task.cancel()

    async def _serve(self, call: calls_pb2.UnaryCall) -> None:
        call_id, context = call.call_id, self._context_of(call)
        try:
            check_request(call)
            timeout_s = seconds(call, "timeout")
            handler, request = self._handler(call.method), call.request
            del call
            if timeout_s is not None and timeout_s <= 0:
                raise TimeoutError
            async with asyncio.timeout(timeout_s):
                reply = await handler.unary_unary(handler.request_deserializer(request), context)
            self._reply(call_id, handler.response_serializer(reply))
        except grpc.aio.AbortError:
            self._fail(call_id, context.status)
        except TimeoutError:
            late = DeadlineExceeded(Reason.DEADLINE, "the call's time was over", metadata={"phase": "call"})
            self._refuse(call_id, late)
        except KVGrpcError as error:
            self._refuse(call_id, error)
        except Exception as error:  # noqa: BLE001 - no call may stop the server
            _log.exception("a call over a stream failed")
            self._refuse(call_id, InternalError(Reason.INTERNAL, f"a defect of kvgrpc: {error!r}"))

    def _context_of(self, call: calls_pb2.UnaryCall) -> "_Context":
        """Returns the context of a call: the caller is the stream's caller, with what the stream's metadata says."""
        shown = ((key, value) for key, value in self._context.invocation_metadata() or () if key != TRACEPARENT)
        trace = telemetry.metadata(readable_trace(call.traceparent))
        return _Context(self._context.peer(), CALLER.get(), (*trace, *shown))

    def _handler(self, method: str) -> Any:
        handler = self._unary.get(method)
        if handler is None:
            raise Unimplemented(Reason.FEATURE_UNAVAILABLE, f"this server has no unary method {method!r} to call so")
        return handler

    def _reply(self, call_id: int, reply: bytes) -> None:
        most = self._answers.answer_bytes
        if len(reply) > most:
            raise too_many(f"the reply has {len(reply)} bytes; over a stream the limit is {most}", most)
        self._answers.answer(call_id, len(reply)).reply = reply
        self._answers.see_to_write()

    def _refuse(self, call_id: int, error: KVGrpcError) -> None:
        self._fail(call_id, grpc_status.packed_status(error.untraced(), self._lead.header()))

    def _fail(self, call_id: int, packed: bytes) -> None:
        self._answers.answer(call_id, len(packed)).error.MergeFromString(packed)
        self._answers.see_to_write()

    def _over(self, call_id: int, _: asyncio.Task[None]) -> None:
        del self._served[call_id]


class _Context:
    """The context that a method gets for its call. `status`: the google.rpc.Status of a call that ended in an error."""

    def __init__(self, peer: str, caller: KnownCaller, metadata: Metadata) -> None:
        self._peer = peer
        self.caller = caller
        self._metadata = metadata
        self.status = b""

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def peer(self) -> str:
        return self._peer

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: tuple[tuple[str, bytes], ...] = ()
    ) -> NoReturn:
        self.status = dict(trailing_metadata)[grpc_status.DETAILS_KEY]
        raise grpc.aio.AbortError(code, details)
