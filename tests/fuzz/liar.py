"""A source whose answers are heavy: unary ones, and those on the streams between leads."""

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import google_crc32c
import grpc

from kvgrpc.peer.v1 import peer_pb2
from tests.fuzz.heavy import Heavy
from tests.fuzz.messages import Known
from tests.service.engines import BLOCK_BYTES, Engine
from tests.service.rogue import Rogue
from tests.service.values import dur

REPLIES = (
    "Handshake", "KeepLiveness", "OpenAccess", "ChecksumBlocks", "SettleAccess", "CloseAccess", "RenewLeases",
    "Converse",
)  # fmt: skip
"""RPCs of which one has heavy replies in each life."""
SHORT_TTL_S = 0.15
"""TTL of a lease that is to be renewed soon, in seconds."""
_CALLS = {
    "open_access": "OpenAccess",
    "settle_access": "SettleAccess",
    "close_access": "CloseAccess",
    "checksum_blocks": "ChecksumBlocks",
}


class Liar(Rogue):
    """A good source with a new life for every input, but for one RPC per life. `converses`: also on the stream."""

    def __init__(self, like: Engine, known: Known, *, converses: bool) -> None:
        super().__init__(like)
        self._known, self._converses = known, converses
        self.sent_bytes = 0
        """Size of the largest heavy reply in this life, or 0."""

    def live_anew(self, incarnation: int, rpc: str, seed: float) -> None:
        """Begins the next life, in which the replies of this RPC are heavy."""
        self.engine.incarnation = incarnation
        self.sent_bytes = 0
        self.changes = {"OpenAccess": _short} if rpc == "RenewLeases" else {}
        self.changes[rpc] = self._heavy(seed)

    def _heavy(self, seed: float) -> Callable[[Any], bytes]:
        def change(reply: Any) -> bytes:
            body = Heavy(Random(seed), self._known).body(reply.DESCRIPTOR, reply)
            self.sent_bytes = max(self.sent_bytes, len(body))
            return body

        return change

    def PartsReady(self, request: peer_pb2.PartsReadyRequest, context: Any) -> peer_pb2.PartsReadyResponse:  # noqa: N802
        return self._changed("PartsReady", peer_pb2.PartsReadyResponse(), context)

    def ChecksumBlocks(  # noqa: N802
        self, request: peer_pb2.ChecksumBlocksRequest, context: Any
    ) -> peer_pb2.ChecksumBlocksResponse:
        blocks = sum(sum(rows.runs.counts) for part in request.blocks for rows in part.blocks)
        values = [google_crc32c.value(bytes(BLOCK_BYTES))] * blocks
        reply = peer_pb2.ChecksumBlocksResponse(ranks=[peer_pb2.RankChecksums(rank=0, values=values)])
        return self._changed("ChecksumBlocks", reply, context)

    def Converse(  # noqa: N802
        self, request_iterator: Iterator[peer_pb2.ConverseRequest], context: Any
    ) -> Iterator[peer_pb2.ConverseResponse]:
        if not self._converses:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "a peer of an earlier version")
        context.send_initial_metadata(())
        for message in request_iterator:
            reply = peer_pb2.ConverseResponse()
            for call in message.calls:
                kind: Any = call.WhichOneof("call")
                said: Any = getattr(self, _CALLS[kind])(getattr(call, kind), context)
                into = getattr(reply.answers.add(call_id=call.call_id), kind)
                into.SetInParent()
                into.MergeFromString(said if isinstance(said, bytes) else said.SerializeToString())
            yield self._changed("Converse", reply, context)


def _short(reply: peer_pb2.OpenAccessResponse) -> None:
    for row in reply.results:
        row.ttl.CopyFrom(dur(SHORT_TTL_S))
        row.remaining.CopyFrom(dur(SHORT_TTL_S))
