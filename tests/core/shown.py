"""Secrets that honest peers show to a node under test, and that they tell it to show."""

import dataclasses
import hashlib

from kvgrpc.core import events
from kvgrpc.core.events import Event
from kvgrpc.core.node import Node
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.ids import peer_key


def secret(what: str, life: str) -> bytes:
    """Returns a secret of 32 bytes."""
    return hashlib.sha256(f"{what} {life}".encode()).digest()


def showing(event: Event, node: Node) -> Event:
    """Returns the event as an honest peer sends it: with its own secrets, and those that the node told it to show."""
    peers = node.state.peers.lives
    match event:
        case events.HandshakeReceived(asks=b""):
            known = peers.get(_key(event.peer))
            life, proofs = _key(event.peer), known.asks if known else ()
            return dataclasses.replace(event, shows=secret("shown", life), asks=secret("asked", life), proofs=proofs)
        case events.PeerAnswered(asks=b""):
            known, life = peers.get(_key(event.peer)), _key(event.peer)
            asks = known.asks[0] if known else secret("asked", life)
            return dataclasses.replace(event, shows=secret("shown", life), asks=asks)
        case events.PeerAlive(proof=b"") if event.peer in peers:
            return dataclasses.replace(event, proof=peers[event.peer].asks[0])
        case _ if isinstance(event, events.PeerRequest):
            peer = peers.get(peer_key(event.engine_id, event.incarnation))
            if peer is not None and not event.call.proof:
                return dataclasses.replace(event, call=dataclasses.replace(event.call, proof=peer.asks[0]))
    return event


def _key(description: EngineDescription) -> str:
    return peer_key(description.engine_id, description.incarnation)
