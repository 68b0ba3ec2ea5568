"""Changes of peers' accesses, made in the tables and the ledger together."""

from kvgrpc.core.state.node_state import NodeState
from kvgrpc.core.tables.accesses import Access
from kvgrpc.core.tables.ledger import RowKind
from kvgrpc.core.tables.peers import Peer
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.values.owners import PEER


def add_access(state: NodeState, peer: Peer, access: Access) -> None:
    """Adds a new access of a peer's life, which pays for it."""
    state.accesses[access.id] = access
    peer.accesses[access.id] = None
    state.ledger.keep(RowKind.ACCESS, access.id, PEER + peer.key, access.kept_bytes)


def weigh_access(state: NodeState, access: Access) -> None:
    """Updates an access's weight after it pins other blocks or holds other things."""
    access.pinned_bytes = state.pins.kept_bytes(access.owner, PinKind.ACCESS)
    state.ledger.weigh(RowKind.ACCESS, access.id, access.kept_bytes)


def forget_access(state: NodeState, access: Access) -> None:
    """Removes an access from all tables."""
    del state.accesses[access.id]
    state.ledger.drop(RowKind.ACCESS, access.id)
    peer = state.peers.get(access.peer)
    if peer is not None:
        peer.accesses.pop(access.id, None)
