"""A consumer that is no kvgrpc server. It calls HandshakeService and PeerService itself, also with faulty messages."""

import secrets
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.message import Message

from kvgrpc.core.values.content import chain
from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.v1 import common_pb2, handshake_pb2, pool_types_pb2
from tests.service.engines import Engine
from tests.service.values import new_key


class Consumer:
    """Another engine from the view of `issuer`, with an id, a life, and a pool like the issuer's own."""

    def __init__(self, issuer: Engine) -> None:
        self._issuer = issuer
        described = issuer.api.handshake.GetCapabilities(handshake_pb2.GetCapabilitiesRequest()).engine
        described.engine_id = f"consumer-{secrets.token_hex(4)}"
        described.incarnation = secrets.randbits(52) + 1
        described.address = ""
        self.engine = described
        self.told, self.shows = secrets.token_bytes(32), b""
        """Proof that this life gave to the issuer, and proof that the issuer gave to this life."""
        self._beats = threading.Event()

    @property
    def caller(self) -> peer_pb2.Caller:
        return peer_pb2.Caller(engine_id=self.engine.engine_id, incarnation=self.engine.incarnation, proof=self.shows)

    def handshake(self) -> handshake_pb2.HandshakeResponse:
        """Introduces this life of the consumer, and keeps the issuer's proof."""
        reply = self._issuer.api.handshake.Handshake(self.introduction())
        self.shows = reply.proof
        return reply

    def introduction(self) -> handshake_pb2.HandshakeRequest:
        shown, rank = [self.shows] if self.shows else [], pool_types_pb2.RankEndpoint(rank=0)
        return handshake_pb2.HandshakeRequest(engine=self.engine, endpoints=[rank], proof=self.told, proofs=shown)

    def restarted(self) -> "Consumer":
        """Returns the same engine in its next life."""
        other = Consumer(self._issuer)
        other.engine.engine_id = self.engine.engine_id
        return other

    def ask(self, request: Message, **fields: Any) -> Any:
        """Makes a call of this life at the issuer, and returns the reply."""
        return self._issuer.api.ask(self.caller, request, **fields)

    def open(
        self, grant: common_pb2.Grant, token_ids: Sequence[int], access_id: bytes = b"", *, use_tokens: int = 0
    ) -> peer_pb2.OpenAccessResponse:
        """Calls OpenAccess for a prefix of a prompt."""
        return self.open_row(opening(grant.token, token_ids, access_id or new_key(), use_tokens=use_tokens))

    def open_row(self, *rows: peer_pb2.AccessOpening) -> peer_pb2.OpenAccessResponse:
        reply: peer_pb2.OpenAccessResponse = self.ask(peer_pb2.OpenAccessRequest(openings=rows))
        return reply

    def settle(self, access_id: bytes, *, last: bool = True) -> peer_pb2.SettledAccess:
        row = peer_pb2.AccessSettling(access_id=access_id, last=last)
        (result,) = self.ask(peer_pb2.SettleAccessRequest(settlings=[row])).results
        assert isinstance(result, peer_pb2.SettledAccess)
        return result

    def close(self, access_id: bytes, outcome: int, token: bytes = b"") -> bool:
        """Calls CloseAccess, and returns whether the access was open."""
        row = peer_pb2.AccessClosing(access_id=access_id, outcome=outcome, quiesced=True, token=token)  # type: ignore[arg-type]
        (result,) = self.ask(peer_pb2.CloseAccessRequest(closings=[row])).results
        was_open: bool = result.was_open
        return was_open

    def beats(self, count: int = 1) -> Iterator[peer_pb2.KeepLivenessResponse]:
        """Sends that many beats on a liveness stream, and returns the answers."""
        rows = [peer_pb2.KeepLivenessRequest(caller=self.caller)] * count
        return self._issuer.api.peer.KeepLiveness(iter(rows), timeout=10)


def opening(token: bytes, token_ids: Sequence[int], access_id: bytes, *, use_tokens: int = 0) -> peer_pb2.AccessOpening:
    """Returns a row of OpenAccess that claims the first `use_tokens` tokens of a prompt; 0 means all."""
    count = use_tokens or len(token_ids)
    digest = chain(token_ids[:count]).digest(count)
    claim = peer_pb2.ContentClaim(token_count=count, digest=digest)
    return peer_pb2.AccessOpening(access_id=access_id, token=token, content=claim)
