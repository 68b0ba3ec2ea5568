"""PeerService: the streams of other leads to this one, of calls and of beats."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from kvgrpc.core import events
from kvgrpc.core.values.ids import peer_key
from kvgrpc.errors import KVGrpcError
from kvgrpc.peer.v1 import peer_pb2, peer_pb2_grpc
from kvgrpc.service import grpc_status
from kvgrpc.service.lead import Lead
from kvgrpc.service.places import CONNECTION, Places
from kvgrpc.service.rpc.converse import Conversation
from kvgrpc.service.rpc.method import streaming


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
