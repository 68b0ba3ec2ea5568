"""The answering side of a stream of calls between leads (PeerService.Converse).

Calls are fed to the node in the order in which they come. Most are answered before the next one is read; a call that
has to wait does not delay others. Answers known at the same time go out in one message.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc.aio

from kvgrpc.core import actions, events
from kvgrpc.core.values.owners import ANONYMOUS
from kvgrpc.core.values.records import dataclass
from kvgrpc.errors import Exhausted, InternalError, InvalidRequest, KVGrpcError, OutOfRange, Reason
from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.service import telemetry
from kvgrpc.service.lead import Lead
from kvgrpc.service.rpc.method import check_request
from kvgrpc.service.rpc.outgoing import Outgoing
from kvgrpc.v1.common_pb2 import ResponseHeader
from kvgrpc.wire import accesses, answers, fields, peer_requests, sends
from kvgrpc.wire.accesses import call_error

_log = logging.getLogger(__name__)

WAITING_MAX = 4_096
"""Maximum number of calls of one stream that wait for their answer."""
TURN_S = 0.005
"""Time to handle calls of one message before other work runs, in seconds: a message may have thousands."""


@dataclass(frozen=True)
class _Method:
    """One kind of call: how to make the core's event from it, and how to put the answer into the reply."""

    name: str
    to_event: Callable[[Lead, Any, events.Call], events.Event]
    put_reply: Callable[[ResponseHeader, Any, Any], None]


def put_openings(header: ResponseHeader, answer: actions.Openings, into: peer_pb2.OpenAccessResponse) -> None:
    """Fills in the reply to OpenAccess."""
    into.header.CopyFrom(header)
    answers.openings(answer, into)


def put_verdicts(header: ResponseHeader, answer: actions.Verdicts, into: peer_pb2.SettleAccessResponse) -> None:
    """Fills in the reply to SettleAccess."""
    into.header.CopyFrom(header)
    into.results.extend(answers.verdicts(answer))


def put_closings(header: ResponseHeader, answer: actions.Closings, into: peer_pb2.CloseAccessResponse) -> None:
    """Fills in the reply to CloseAccess."""
    into.header.CopyFrom(header)
    into.results.extend([peer_pb2.ClosedAccess(was_open=was_open) for was_open in answer.rows])


def put_widened(header: ResponseHeader, _: actions.Widened, into: peer_pb2.PartsReadyResponse) -> None:
    """Fills in the reply to PartsReady."""
    into.header.CopyFrom(header)


def put_checksums(header: ResponseHeader, answer: actions.Checksums, into: peer_pb2.ChecksumBlocksResponse) -> None:
    """Fills in the reply to ChecksumBlocks."""
    into.header.CopyFrom(header)
    accesses.put_checksums(answer.by_rank, into)


def open_access(lead: Lead, request: peer_pb2.OpenAccessRequest, call: events.Call) -> events.OpenAccess:
    """Makes the event of OpenAccess. Checks the caller first: blocks that an unproved peer names are not looked at."""
    lead.check_caller(request.caller)
    return peer_requests.open_access(request, call, lead.block_limit)


def parts_ready(lead: Lead, request: peer_pb2.PartsReadyRequest, call: events.Call) -> events.PartsReady:
    """Makes the event of PartsReady, after the same check."""
    lead.check_caller(request.caller)
    return peer_requests.parts_ready(request, call, lead.block_limit)


def checksum_blocks(lead: Lead, request: peer_pb2.ChecksumBlocksRequest, call: events.Call) -> events.ChecksumBlocks:
    """Makes the event of ChecksumBlocks, after the same check."""
    lead.check_caller(request.caller)
    return peer_requests.checksum_blocks(request, call, lead.block_limit)


def put_send(header: ResponseHeader, answer: actions.SendUnderWay, into: peer_pb2.PostSendResponse) -> None:
    """Fills in the reply to PostSend."""
    into.header.CopyFrom(header)
    sends.put_send_under_way(answer.values, into)


def post_send(lead: Lead, request: peer_pb2.PostSendRequest, call: events.Call) -> events.PostSend:
    """Makes the event of PostSend, after the same check."""
    lead.check_caller(request.caller)
    return sends.post_send(request, call)


_METHODS = {
    "open_access": _Method("OpenAccess", open_access, put_openings),
    "settle_access": _Method("SettleAccess", lambda _, row, call: peer_requests.settle_access(row, call), put_verdicts),
    "close_access": _Method("CloseAccess", lambda _, row, call: peer_requests.close_access(row, call), put_closings),
    "parts_ready": _Method("PartsReady", parts_ready, put_widened),
    "checksum_blocks": _Method("ChecksumBlocks", checksum_blocks, put_checksums),
    "post_send": _Method("PostSend", post_send, put_send),
}


class Conversation:
    """One stream of one caller."""

    def __init__(self, lead: Lead, context: Any) -> None:
        self._lead = lead
        self._context = context
        self._outgoing = Outgoing(context, peer_pb2.ConverseResponse, lead.config.limits.message_bytes)
        self._waiting: set[int] = set()
        """Ids of the waiting calls at the node."""
        self._caller = peer_pb2.Caller()
        """The caller of the whole stream, with its proof; empty: each call names its own."""

    async def run(self) -> None:
        """Serves until the caller ends the stream."""
        await self._context.send_initial_metadata(())  # tells the caller that this server knows the method
        try:
            while (message := await self._lead.standing.read(self._context.read)) is not grpc.aio.EOF:
                check_request(message)
                if message.HasField("caller") and not self._caller.engine_id:
                    self._caller.CopyFrom(message.caller)
                self._outgoing.more = True
                await self._take_all(message.calls)
                self._outgoing.more = False
                await self._outgoing.write()
                del message  # frees it now: the next message may come much later
        finally:
            self._outgoing.close()
            for number in list(self._waiting):
                self._lead.runner.abandon(number)

    async def _take_all(self, calls: Sequence[peer_pb2.PeerCall]) -> None:
        """Takes all calls of one message, and lets other work run in between."""
        began = time.monotonic()
        for call in calls:
            self._take(call)
            if time.monotonic() - began > TURN_S:
                await asyncio.sleep(0)
                began = time.monotonic()

    def _take(self, call: peer_pb2.PeerCall) -> None:
        """Feeds one call to the node. The answer comes now or later."""
        kind = call.WhichOneof("call")
        method = _METHODS.get(kind or "")
        if kind is None or method is None:
            self._fail(call.call_id, InvalidRequest(Reason.INVALID_FIELD, "this server does not know that call"))
            return
        if len(self._waiting) >= WAITING_MAX:
            limit = {"limit": str(WAITING_MAX)}
            error = Exhausted(Reason.LIMIT_EXCEEDED, f"{WAITING_MAX} calls wait", retry_delay_s=0.1, metadata=limit)
            self._fail(call.call_id, error)
            return
        name = f"PeerService/{method.name}"
        trace, ended = telemetry.server_call(name, answers.readable_trace(call.traceparent))
        runner = self._lead.runner
        number = runner.next_call_id()

        def answered(reply: actions.Reply | KVGrpcError) -> None:
            self._waiting.discard(number)
            if isinstance(reply, KVGrpcError):
                ended(reply)
                self._fail(call.call_id, reply)
                return
            ended(None)
            answer = self._outgoing.answer(call.call_id)
            method.put_reply(self._lead.header(), reply.answer, getattr(answer, kind))
            nbytes, most = answer.ByteSize(), self._outgoing.answer_bytes
            if nbytes > most:  # otherwise the message is refused with all answers in it
                what = f"the answer to {method.name} has {nbytes} bytes; the limit is {most}"
                answer.error.CopyFrom(call_error(OutOfRange(Reason.LIMIT_EXCEEDED, what)))
                answer.ClearField(kind)
            self._outgoing.see_to_write()

        self._waiting.add(number)
        try:
            request = getattr(call, kind)
            fields.check(request)
            if self._caller.engine_id:
                request.caller.CopyFrom(self._caller)
            made = events.Call(number, ANONYMOUS, trace, proof=request.caller.proof)
            event = method.to_event(self._lead, request, made)
        except KVGrpcError as error:
            answered(error)
        except Exception as error:  # noqa: BLE001 - no request may stop the server
            _log.exception("%s failed", name)
            answered(InternalError(Reason.INTERNAL, f"a defect of kvgrpc: {error!r}"))
        else:
            runner.submit(number, event, answered)

    def _fail(self, call_id: int, error: KVGrpcError) -> None:
        self._outgoing.answer(call_id).error.CopyFrom(call_error(error.untraced()))
        self._outgoing.see_to_write()
