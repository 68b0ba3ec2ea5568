"""Lets a lead connect to peers by address, or lets peers introduce themselves to it."""

from typing import Any

from kvgrpc.core import events
from kvgrpc.core.tables.peers import PeerState
from kvgrpc.core.values.compatibility import EngineDescription
from tests.core.nodes import Lead, endpoints, key_of


def state_of(lead: Lead, peer: EngineDescription) -> PeerState:
    state: PeerState = lead.state.peers.lives[key_of(peer)].state
    return state


def connect(lead: Lead, address: str = "p:1", engine_id: str = "") -> int:
    return lead.ask(lambda c: events.ConnectPeer(c, address, engine_id), principal="router")


def introduce(lead: Lead, peer: EngineDescription, expected: str = "", *, late: bool = False, **fields: Any) -> int:
    """Lets a peer introduce itself; `late` means that the life is over, and its message was delayed."""
    if not late:
        lead.silence_former(peer)
    where = fields.get("endpoints", endpoints(peer))
    return lead.ask(lambda c: events.HandshakeReceived(c, peer, where, expected), principal="peer")
