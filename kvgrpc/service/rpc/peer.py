"""PeerService: the streams of other leads to this one, of calls and of beats.

Calls are fed to the node in the order in which they come. Most are answered before the next one is read; a call that
has to wait does not delay others. Answers known at the same time go out in one message.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import field
from functools import partial
from typing import Any

import grpc.aio

from kvgrpc.core import actions, events
from kvgrpc.core.values.ids import peer_key
from kvgrpc.core.values.records import dataclass
from kvgrpc.errors import DeadlineExceeded, InternalError, InvalidRequest, KVGrpcError, Reason, Unavailable, too_many
from kvgrpc.peer.v1 import peer_pb2, peer_pb2_grpc
from kvgrpc.service import grpc_status, telemetry
from kvgrpc.service.call_records import OK
from kvgrpc.service.callers import PRINCIPAL
from kvgrpc.service.lead import Lead
from kvgrpc.service.open_streams import StreamAnswers
from kvgrpc.service.places import CONNECTION, Places
from kvgrpc.service.rpc.method import check_request, streaming
from kvgrpc.service.runner import copied
from kvgrpc.wire import fields, paths, peer_calls, sends
from kvgrpc.wire.accesses import CALLS
from kvgrpc.wire.answers import readable_trace
from kvgrpc.wire.values import timeout_s

_log = logging.getLogger(__name__)

TURN_S = 0.005
"""Time to handle calls of one message before other work runs, in seconds: a message may have thousands."""


@dataclass(frozen=True)
class _PeerMethod:
    """One kind of call: how to make the core's event from it, and how to put the answer into the reply."""

    to_event: Callable[[Any, peer_pb2.Caller, events.Call, int], events.Event]
    put_answer: Callable[[Any, Any], None]


_METHODS = {
    "open_access": _PeerMethod(peer_calls.open_access, peer_calls.openings),
    "settle_access": _PeerMethod(
        lambda request, caller, call, _: peer_calls.settle_access(request, caller, call), peer_calls.verdicts
    ),
    "close_access": _PeerMethod(
        lambda request, caller, call, _: peer_calls.close_access(request, caller, call), peer_calls.closings
    ),
    "parts_ready": _PeerMethod(peer_calls.parts_ready, lambda *_: None),
    "checksum_blocks": _PeerMethod(peer_calls.checksum_blocks, peer_calls.checksums),
    "post_send": _PeerMethod(
        lambda request, caller, call, _: sends.post_send(request, caller, call), peer_calls.send_under_way
    ),
}
"""Methods by the fields of PeerCall and PeerAnswer."""
ROWS = peer_pb2.PeerCall.DESCRIPTOR.full_name
"""Begin of the names of these methods in the table of roles."""


@dataclass(eq=False)
class _Call:
    """One call that is not answered yet."""

    call_id: int
    kind: str
    ended: telemetry.Ended
    request: Any
    """The request; None once the node has it."""
    timer: asyncio.TimerHandle | None = None
    began: float = field(default_factory=time.perf_counter)


class Conversation:
    """One stream of one caller. Its calls take places of `places` while they are not answered."""

    def __init__(self, lead: Lead, context: Any, places: Places) -> None:
        self._lead = lead
        self._context = context
        self._places = places
        self._connection = CONNECTION.get()
        self._message_bytes = lead.config.limits.message_bytes
        self._answers = StreamAnswers(context, peer_pb2.ConverseResponse, self._message_bytes)
        self._calls: dict[int, _Call] = {}
        """Calls by their ids at the node."""
        self._caller = peer_pb2.Caller()
        """The caller of all calls, with its proof; empty until a message states it."""
        self._answered_all: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Serves until the caller ends the stream and its last call is answered."""
        await self._context.send_initial_metadata(())  # some libraries wait for it before they send anything
        try:
            while (message := await self._lead.standing.read(self._context.read)) is not grpc.aio.EOF:
                check_request(message)
                if message.HasField("caller") and not self._caller.engine_id:
                    self._meet(message.caller)
                self._answers.more = True
                await self._take_all(message.calls)
                self._answers.more = False
                await self._answers.write()
                del message  # frees it now: the next message may come much later
            await self._lead.standing.read(self._settle)
        finally:
            self._answers.close()
            for number in list(self._calls):
                self._give_up(number, Unavailable(Reason.PEER_UNREACHABLE, "the stream ended before the answer"))

    async def _settle(self) -> None:
        """Waits for the unanswered calls, and sends their answers."""
        if self._calls:
            self._answered_all = asyncio.get_running_loop().create_future()
            await self._answered_all
        await self._answers.write()

    def _meet(self, caller: peer_pb2.Caller) -> None:
        """Takes the caller of the stream, and answers no longer than that lead takes."""
        self._caller.CopyFrom(caller)
        peer = self._lead.runner.node.state.peers.lives.get(peer_key(caller.engine_id, caller.incarnation))
        if peer is not None:
            self._answers.bound(min(self._message_bytes, peer.description.message_bytes))

    async def _take_all(self, calls: Sequence[peer_pb2.PeerCall]) -> None:
        """Takes all calls of one message, and lets other work run in between."""
        began = time.monotonic()
        for call in calls:
            self._take(call)
            if time.monotonic() - began > TURN_S:
                await asyncio.sleep(0)
                began = time.monotonic()

    def _take(self, message: peer_pb2.PeerCall) -> None:
        """Feeds one call to the node. The answer comes now or later."""
        kind = message.WhichOneof("call")
        if kind is None:
            unknown = InvalidRequest(Reason.INVALID_FIELD, "this server does not know that call")
            self._refuse(message.call_id, unknown)
            return
        stated = message.traceparent and readable_trace(message.traceparent)
        trace, ended = telemetry.call_span(f"kvgrpc.peer.v1.PeerService/{CALLS[kind]}", stated)
        try:
            self._places.take(self._connection)
        except KVGrpcError as error:
            ended(error)
            self._refuse(message.call_id, error)
            return
        runner = self._lead.runner
        number = runner.next_call_id()
        call = self._calls[number] = _Call(message.call_id, kind, ended, getattr(message, kind))
        try:
            wait_s = timeout_s(message, "timeout")
            event = self._event(call, number, trace)
        except KVGrpcError as error:
            self._answered(number, error)
        except Exception as error:  # noqa: BLE001 - no request may stop the server
            self._answered(number, _defect(kind, error))
        else:
            runner.submit(number, event, partial(self._answered, number))
            call.request = None
            if wait_s is not None and number in self._calls:
                late = DeadlineExceeded(Reason.DEADLINE, "the call's time was over", metadata={"phase": "call"})
                call.timer = asyncio.get_running_loop().call_later(wait_s, self._give_up, number, late)

    def _event(self, call: _Call, number: int, trace: str) -> events.Event:
        """Returns the event of a call. The caller is checked before the blocks that it names are looked at."""
        lead, caller = self._lead, self._caller
        lead.gate.check_within(f"{ROWS}/{call.kind}")
        fields.check(call.request)
        lead.check_caller(caller)
        made = events.Call(number, PRINCIPAL.get(), trace, connection=self._connection, proof=caller.proof)
        return _METHODS[call.kind].to_event(call.request, caller, made, lead.block_limit)

    def _answered(self, number: int, reply: actions.Reply | KVGrpcError) -> None:
        call = self._end(number)
        if isinstance(reply, KVGrpcError):
            error: KVGrpcError | None = paths.placed(copied(reply), call.request)
        else:
            error = self._reply(call, reply)
        self._over(call, error)
        if error is not None:
            self._refuse(call.call_id, error)

    def _reply(self, call: _Call, reply: actions.Reply) -> KVGrpcError | None:
        """Adds the reply to the next message. Returns the error of a reply that cannot be sent, which is taken back."""
        answer = self._answers.answer(call.call_id)
        try:
            into = getattr(answer, call.kind)
            into.header.CopyFrom(self._lead.header())
            _METHODS[call.kind].put_answer(reply.answer, into)
        except Exception as error:  # noqa: BLE001 - the event is handled: its answer is no defect of the node
            self._answers.take_back()
            return _defect(call.kind, error)
        nbytes, most = answer.ByteSize(), self._answers.answer_bytes
        if nbytes > most:  # otherwise the message is refused with all answers in it
            self._answers.take_back()
            return too_many(f"the answer to {CALLS[call.kind]} has {nbytes} bytes; the limit is {most}", most)
        self._answers.see_to_write()
        return None

    def _refuse(self, call_id: int, error: KVGrpcError) -> None:
        packed = grpc_status.packed_status(error.untraced(), self._lead.header())
        self._answers.answer(call_id, len(packed)).error.MergeFromString(packed)
        self._answers.see_to_write()

    def _give_up(self, number: int, error: KVGrpcError) -> None:
        """Ends a call without an answer: nobody waits for one any more."""
        self._over(self._end(number), error)
        self._lead.runner.abandon(number)

    def _over(self, call: _Call, error: KVGrpcError | None) -> None:
        call.ended(error)
        if self._lead.calls.counting:
            self._lead.calls.ended(f"{ROWS}/{call.kind}", error.code if error else OK, call.began)

    def _end(self, number: int) -> _Call:
        call = self._calls.pop(number)
        self._places.give_back(self._connection)
        if call.timer is not None:
            call.timer.cancel()
        if self._answered_all is not None and not self._calls and not self._answered_all.done():
            self._answered_all.set_result(None)
        return call


def _defect(kind: str, error: Exception) -> KVGrpcError:
    _log.error("%s failed", CALLS[kind], exc_info=error)
    return InternalError(Reason.INTERNAL, f"a defect of kvgrpc: {error!r}")


class PeerService(peer_pb2_grpc.PeerServiceServicer):
    """Serves both kinds of streams. `calls`: places of the calls on streams."""

    def __init__(self, lead: Lead, calls: Places) -> None:
        self._lead = lead
        self._calls = calls
        self._streams: Counter[str] = Counter()
        """Number of open liveness streams by peer key: more than one while a peer reconnects."""

    async def Converse(self, request_iterator: object, context: Any) -> None:  # type: ignore[override]
        """Serves one stream, whose conversation writes each answer when it is known."""
        try:
            with self._lead.standing.one():
                await Conversation(self._lead, context, self._calls).run()
        except KVGrpcError as error:
            await grpc_status.abort(context, error, self._lead.header())
        finally:
            del context  # the context keeps the error that ends its call, and the error keeps this frame

    @streaming
    async def KeepLiveness(
        self, request: AsyncIterator[peer_pb2.KeepLivenessRequest], trace: str
    ) -> AsyncIterator[peer_pb2.KeepLivenessResponse]:
        """Answers every beat. Silence, or the end of the stream, makes the caller suspect. A second stream of the same
        life over the same connection replaces the first. A stream belongs to the life whose proof its first beat shows,
        while that proof is valid.
        """
        lead = self._lead
        beats = aiter(request)
        caller, key, shown = peer_pb2.Caller(), "", b""
        try:
            with lead.standing.one(of_life=True):
                while True:
                    try:
                        async with asyncio.timeout(lead.config.limits.peer_grace_s / 2):
                            beat = await lead.standing.read(beats.__anext__)
                    except (StopAsyncIteration, TimeoutError):
                        return
                    if not key:
                        caller.CopyFrom(beat.caller)
                    del beat  # frees it now: the next message may come much later
                    lead.check_caller(caller)
                    if not key:
                        key = peer_key(caller.engine_id, caller.incarnation)
                        self._streams[key] += 1
                        lead.standing.replace((CONNECTION.get(), key))
                        shown = next(iter(lead.runner.node.state.peers.lives[key].shows), b"")
                    lead.runner.feed(events.PeerAlive(key, caller.proof))
                    yield peer_pb2.KeepLivenessResponse(header=lead.header(), proof=shown)
                    shown = b""
        finally:
            if key:
                self._leave(key)

    def _leave(self, key: str) -> None:
        """Takes the end of a peer's stream, by close or silence. The end of the last one makes the peer suspect."""
        self._streams[key] -= 1
        if self._streams[key] <= 0:
            del self._streams[key]
            self._lead.runner.feed(events.PeerSilent(key))
