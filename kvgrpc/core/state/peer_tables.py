"""The tables of peers: lives of other engines, and handshakes with them."""

from kvgrpc.core.events import SendWanted
from kvgrpc.core.state.caller_budget import CallerBudget
from kvgrpc.core.state.handshake import Handshake, OutgoingHandshake
from kvgrpc.core.tables.peers import Peer, PeerState
from kvgrpc.core.values.ids import peer_key
from kvgrpc.core.values.networks import PrivateNetworks
from kvgrpc.errors import PreconditionFailed, Reason


class PeerTables:
    """Tables of the other leads that a lead knows."""

    def __init__(self, networks: PrivateNetworks) -> None:
        self.networks = networks
        self.lives: dict[str, Peer] = {}
        """Peers by life. The lead ends them all before an incarnation begins."""
        self.dial_budget = CallerBudget("handshakes with other engines")
        self.begin()

    def begin(self) -> None:
        """Makes empty tables for a new incarnation."""
        self.dials: dict[str, OutgoingHandshake] = {}
        """Handshakes that this lead started, by address."""
        self.handshakes: dict[str, Handshake] = {}
        """All handshakes under way, by key."""
        self.meetings: dict[str, list[SendWanted]] = {}
        """Requests of our ranks to meet ranks of a peer, by its life. The peer has only introduced itself so far."""
        self.on_device = False
        """True when some rank has offered device memory."""

    def caller(self, engine_id: str, incarnation: int, proof: bytes) -> Peer:
        """Returns the calling life of a peer. Raises PreconditionFailed (NOT_PROVED) for a caller without that life's
        proof, and (NO_HANDSHAKE) for a life that is unknown or dead. A dead life gets NO_HANDSHAKE only with its proof.
        """
        peer = self.lives.get(peer_key(engine_id, incarnation))
        if peer is not None and not peer.proves(proof):
            why = f"the caller does not show what engine {engine_id} was told: shake hands again"
            raise PreconditionFailed(Reason.NOT_PROVED, why)
        if peer is None or peer.state is PeerState.DEAD:
            why = f"engine {engine_id} has no handshake with this incarnation; Handshake first"
            raise PreconditionFailed(Reason.NO_HANDSHAKE, why)
        return peer

    def live_on(self, life: str) -> bool:
        """Returns whether a peer's life is known and not declared dead."""
        peer = self.lives.get(life)
        return peer is not None and peer.state is not PeerState.DEAD
