"""A source whose answers are heavy: those of calls, and the messages of streams that have them."""

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import google_crc32c

from kvgrpc.peer.v1 import peer_pb2
from tests.fuzz.heavy import Heavy
from tests.fuzz.messages import Known
from tests.service.engines import BLOCK_BYTES, Engine
from tests.service.rogue import Rogue
from tests.service.values import dur

OF_ACCESS = ("OpenAccess", "ChecksumBlocks", "SettleAccess", "CloseAccess")
REPLIES = ("Handshake", "KeepLiveness", *OF_ACCESS, "RenewLeases", "Converse")
"""RPCs and calls of which one has heavy replies in each life."""
SHORT_TTL_S = 0.15
"""TTL of a lease that is to be renewed soon, in seconds."""


class Liar(Rogue):
    """A good source with a new life for every input, but for one RPC or call per life."""

    def __init__(self, like: Engine, known: Known) -> None:
        super().__init__(like)
        self._known = known
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

    def parts_ready(self, _request: peer_pb2.PartsReadyRequest) -> peer_pb2.PartsReadyResponse:
        return peer_pb2.PartsReadyResponse()

    def checksum_blocks(self, request: peer_pb2.ChecksumBlocksRequest) -> peer_pb2.ChecksumBlocksResponse:
        blocks = sum(sum(rows.runs.counts) for part in request.blocks for rows in part.blocks)
        values = [google_crc32c.value(bytes(BLOCK_BYTES))] * blocks
        return peer_pb2.ChecksumBlocksResponse(ranks=[peer_pb2.RankChecksums(rank=0, values=values)])

    def Converse(  # noqa: N802
        self, request_iterator: Iterator[peer_pb2.ConverseRequest], context: Any
    ) -> Iterator[Any]:
        for said in super().Converse(request_iterator, context):
            yield self._changed("Converse", said if "Converse" not in self.changes else _read(said), "")


def _read(said: bytes) -> peer_pb2.ConverseResponse:
    return peer_pb2.ConverseResponse.FromString(said)


def _short(reply: peer_pb2.OpenAccessResponse) -> None:
    for row in reply.results:
        row.ttl.CopyFrom(dur(SHORT_TTL_S))
        row.remaining.CopyFrom(dur(SHORT_TTL_S))
