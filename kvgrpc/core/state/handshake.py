"""Handshakes under way: those that we started, one for each address, and those that peers started.

Both wait for our ranks to make an endpoint for the other side; both are bounded. A caller or move that waits for an
address states which engine it expects there, and is judged by that alone: a wrong expectation fails no other.
"""

from dataclasses import dataclass, field

from kvgrpc.core.tables.peers import Peer
from kvgrpc.core.values.endpoints import RankEndpoint


@dataclass(eq=False)
class Shake:
    """A handshake and the endpoints that our ranks made for it."""

    key: str
    """Names it to our ranks; never text from outside."""
    with_whom: str
    """Names the other side to our ranks, which keep few offers for each: a life, or an address to dial."""
    offers: dict[int, RankEndpoint] = field(default_factory=dict)

    def endpoints(self) -> tuple[RankEndpoint, ...]:
        """In the order of the ranks."""
        return tuple(self.offers[rank] for rank in sorted(self.offers))


@dataclass(eq=False)
class Dialling(Shake):
    """One that we started."""

    address: str = ""
    to: str = ""
    """Where it is called: there, or at another address of the life that answers there."""
    proving: str = ""
    """The life that is shown what it has told us; empty: none is."""
    shows: tuple[bytes, ...] = field(default=(), repr=False)
    """What the life that has answered in the place of that one told us to show it."""
    again: bool = False
    """It was called once more, to show another proof than at first."""
    expected_engine_id: str = ""
    """What the call to the peer states; that of the first caller."""
    trace: str = ""
    calls: dict[int, str] = field(default_factory=dict)
    """ConnectPeer calls that wait, and the engine that each expects."""
    peer: str = ""
    """The life that answered, once it has."""
    told: int = -1
    """The generation of our memory that its endpoints are of."""
    longer: bool = False
    """It was given the time that ranks need that meet."""


@dataclass(eq=False)
class Admission(Shake):
    """One that a peer started."""

    peer: Peer = field(kw_only=True)
    """The peer that started it."""
    call_id: int = 0
    protocol: int = 0
    proof: bytes = field(default=b"", repr=False)
    """What the peer is told to show."""
