"""PeerService: the calls of other leads to this one."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from kvgrpc.core import actions, events
from kvgrpc.core.values.ids import peer_key
from kvgrpc.errors import KVGrpcError
from kvgrpc.peer.v1 import peer_pb2, peer_pb2_grpc
from kvgrpc.service import status
from kvgrpc.service.lead import Lead
from kvgrpc.service.places import CONNECTION
from kvgrpc.service.rpc import converse as conversation
from kvgrpc.service.rpc.converse import Conversation, put_checksums, put_closings, put_openings, put_send, put_verdicts
from kvgrpc.service.rpc.method import streaming, unary
from kvgrpc.wire import peer_requests


class PeerService(peer_pb2_grpc.PeerServiceServicer):
    """Converts a request, asks the node, and converts its answer."""

    def __init__(self, lead: Lead) -> None:
        self._lead = lead
        self._streams: Counter[str] = Counter()
        """Number of open liveness streams by peer key: more than one while a peer reconnects."""

    @unary
    async def OpenAccess(self, request: peer_pb2.OpenAccessRequest, trace: str) -> peer_pb2.OpenAccessResponse:
        lead = self._lead
        header, answer = await lead.ask(
            actions.Openings, "OpenAccess", request, trace, lambda call: conversation.open_access(lead, request, call)
        )
        reply = peer_pb2.OpenAccessResponse()
        put_openings(header, answer, reply)
        return reply

    @unary
    async def SettleAccess(self, request: peer_pb2.SettleAccessRequest, trace: str) -> peer_pb2.SettleAccessResponse:
        lead = self._lead
        header, answer = await lead.ask(
            actions.Verdicts, "SettleAccess", request, trace, lambda call: peer_requests.settle_access(request, call)
        )
        reply = peer_pb2.SettleAccessResponse()
        put_verdicts(header, answer, reply)
        return reply

    @unary
    async def CloseAccess(self, request: peer_pb2.CloseAccessRequest, trace: str) -> peer_pb2.CloseAccessResponse:
        lead = self._lead
        header, answer = await lead.ask(
            actions.Closings, "CloseAccess", request, trace, lambda call: peer_requests.close_access(request, call)
        )
        reply = peer_pb2.CloseAccessResponse()
        put_closings(header, answer, reply)
        return reply

    @unary
    async def PartsReady(self, request: peer_pb2.PartsReadyRequest, trace: str) -> peer_pb2.PartsReadyResponse:
        lead = self._lead
        header, _ = await lead.ask(
            actions.Widened, "PartsReady", request, trace, lambda call: conversation.parts_ready(lead, request, call)
        )
        return peer_pb2.PartsReadyResponse(header=header)

    @unary
    async def ChecksumBlocks(
        self, request: peer_pb2.ChecksumBlocksRequest, trace: str
    ) -> peer_pb2.ChecksumBlocksResponse:
        lead = self._lead
        header, answer = await lead.ask(
            actions.Checksums,
            "ChecksumBlocks",
            request,
            trace,
            lambda call: conversation.checksum_blocks(lead, request, call),
        )
        reply = peer_pb2.ChecksumBlocksResponse()
        put_checksums(header, answer, reply)
        return reply

    @unary
    async def PostSend(self, request: peer_pb2.PostSendRequest, trace: str) -> peer_pb2.PostSendResponse:
        lead = self._lead
        header, answer = await lead.ask(
            actions.SendUnderWay, "PostSend", request, trace, lambda call: conversation.post_send(lead, request, call)
        )
        reply = peer_pb2.PostSendResponse()
        put_send(header, answer, reply)
        return reply

    async def Converse(self, request_iterator: object, context: Any) -> None:  # type: ignore[override]
        """Serves one stream, whose conversation writes each answer when it is known."""
        try:
            with self._lead.standing.one():
                await Conversation(self._lead, context).run()
        except KVGrpcError as error:
            await status.abort(context, error, self._lead.header())
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
                        shown = next(iter(lead.node.state.peers[key].shows), b"")
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
