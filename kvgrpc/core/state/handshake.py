"""Handshakes under way: at most one that we started for each address, and those that peers started.

Both kinds wait for our ranks to make an endpoint for the other side, and both are bounded. A caller or move that waits
for an address states the engine that it expects there. A wrong expectation fails nothing else.
"""

from dataclasses import dataclass, field

from kvgrpc.core.tables.peers import Peer
from kvgrpc.core.values.endpoints import RankEndpoint


@dataclass(eq=False)
class Handshake:
    """A handshake and the endpoints that our ranks made for it."""

    key: str
    """Name of the handshake for our ranks. It never contains text from outside."""
    with_whom: str
    """Name of the other side for our ranks: a life, or an address to dial. Ranks keep few offers for each name."""
    offers: dict[int, RankEndpoint] = field(default_factory=dict)

    def endpoints(self) -> tuple[RankEndpoint, ...]:
        """Returns the endpoints in the order of the ranks."""
        return tuple(self.offers[rank] for rank in sorted(self.offers))


@dataclass(eq=False)
class OutgoingHandshake(Handshake):
    """A handshake that we started."""

    address: str = ""
    to: str = ""
    """Address that is called: `address`, or another address of the life that answers there."""
    proving: str = ""
    """The life that is shown the proofs which it told us. Empty when no life is shown any."""
    shows: tuple[bytes, ...] = field(default=(), repr=False)
    """Proofs told by the life that answered instead of `proving`. They are shown to that life only."""
    again: bool = False
    """True after a second call that shows other proofs than the first."""
    expected_engine_id: str = ""
    """The engine id that the first caller expects and that the call to the peer states."""
    trace: str = ""
    calls: dict[int, str] = field(default_factory=dict)
    """Waiting ConnectPeer calls -> engine id that each expects."""
    peer: str = ""
    """The life that answered. Empty before the answer."""
    told: int = -1
    """The memory generation of the endpoints that were sent. -1 before that."""
    longer: bool = False
    """True once the handshake got the extra time that ranks need to meet."""


@dataclass(eq=False)
class IncomingHandshake(Handshake):
    """A handshake that a peer started."""

    peer: Peer = field(kw_only=True)
    call_id: int = 0
    protocol: int = 0
    proof: bytes = field(default=b"", repr=False)
    """Proof that the peer is told to show."""
