"""The tables of accesses: grants in use by peers, and calls of peers that wait."""

from kvgrpc.core.state.peer_tables import PeerTables
from kvgrpc.core.state.waiting_rows import ChecksumAsks, WaitingOpenings
from kvgrpc.core.tables.accesses import Access
from kvgrpc.core.tables.closed_ids import ClosedAccessIds
from kvgrpc.core.tables.ledger import Ledger, RowKind
from kvgrpc.core.tables.peers import Peer
from kvgrpc.core.tables.pins import PinKind, PinTable
from kvgrpc.core.values.owners import PEER


class AccessTables:
    """The accesses of peers in one life."""

    def __init__(self, peers: PeerTables, pins: PinTable, ledger: Ledger) -> None:
        self._peers, self._pins, self._ledger = peers, pins, ledger
        self.rows: dict[bytes, Access] = {}
        """Accesses by id. Only `add` and `forget` change the table."""
        self.openings = WaitingOpenings()
        self.closed_ids = ClosedAccessIds(ledger.limits.accesses)
        self.checksum_asks = ChecksumAsks()
        self.sends: dict[str, tuple[int, str]] = {}
        """Calls of peers that wait until a rank begins to send: name -> call id and pair of ranks."""

    def add(self, peer: Peer, access: Access) -> None:
        """Adds a new access of a peer's life, which pays for it."""
        self.rows[access.id] = access
        peer.accesses[access.id] = None
        self._ledger.keep(RowKind.ACCESS, access.id, PEER + peer.key, access.kept_bytes)

    def weigh(self, access: Access) -> None:
        """Updates an access's weight after it pins other blocks or holds other things."""
        access.pinned_bytes = self._pins.kept_bytes(access.owner, PinKind.ACCESS)
        self._ledger.weigh(RowKind.ACCESS, access.id, access.kept_bytes)

    def forget(self, access: Access) -> None:
        """Removes an access from all tables."""
        del self.rows[access.id]
        self._ledger.drop(RowKind.ACCESS, access.id)
        peer = self._peers.lives.get(access.peer)
        if peer is not None:
            peer.accesses.pop(access.id, None)
