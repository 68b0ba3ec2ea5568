"""Accesses of peers, entered in the tables and in the ledger at once."""

from kvgrpc.core.state.node_state import NodeState
from kvgrpc.core.tables.accesses import Access
from kvgrpc.core.tables.ledger import RowKind
from kvgrpc.core.tables.peers import Peer
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.core.values.owners import PEER


def add_access(state: NodeState, peer: Peer, access: Access) -> None:
    """A new one, of that life of a peer, which pays for it."""
    state.accesses[access.id] = access
    peer.accesses[access.id] = None
    state.ledger.keep(RowKind.ACCESS, access.id, PEER + peer.key, access.kept_bytes)


def weigh_access(state: NodeState, access: Access) -> None:
    """It pins other blocks, or holds other things."""
    access.pinned_bytes = state.pins.kept_bytes(access.owner, PinKind.ACCESS)
    state.ledger.weigh(RowKind.ACCESS, access.id, access.kept_bytes)


def forget_access(state: NodeState, access: Access) -> None:
    """Nothing of it is left."""
    del state.accesses[access.id]
    state.ledger.drop(RowKind.ACCESS, access.id)
    peer = state.peers.get(access.peer)
    if peer is not None:
        peer.accesses.pop(access.id, None)
