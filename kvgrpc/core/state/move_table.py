"""The table of moves: all kinds of moves that are not forgotten, with every index to find them, and their turns."""

from collections.abc import Hashable, Iterator

from kvgrpc.core.state.move import AT_ISSUER, Move
from kvgrpc.core.state.waiting_rows import Closes
from kvgrpc.core.tables.ledger import Ledger, RowKind
from kvgrpc.core.tables.turns import Turns


class MoveTable:
    """All moves that are not forgotten, and their indexes. A move waits for an address or is bound to a peer."""

    def __init__(
        self, ledger: Ledger | None = None, writers: frozenset[str] = frozenset(), *, checksums: bool = False
    ) -> None:
        self._ledger = ledger or Ledger()
        self.writers = writers
        """Data paths over which this engine writes what it pushes."""
        self.checksums = checksums
        """True when every received block is compared with its source's."""
        self.turns = Turns(self._ledger.limits.in_flight_bytes)
        self.closes = Closes()
        self.bytes_received = self.bytes_sent = 0
        self._by_name: dict[str, Move] = {}
        self._by_access: dict[bytes, Move] = {}
        self._by_posting: dict[str, Move] = {}
        self._by_address: dict[str, dict[str, Move]] = {}
        """Moves that wait for the lead at an address."""
        self._by_peer: dict[str, dict[str, Move]] = {}
        """Moves whose access at a peer's life is requested or open."""
        self._unmapped: dict[str, dict[str, Move]] = {}
        """Moves, by address, that have an open access but whose peer must be mapped again."""
        self._stepping: dict[str, Move] = {}
        """Moves that wait only for the engine's step."""

    def add(self, move: Move) -> None:
        """Adds a new move."""
        self._by_name[move.name] = move
        self._ledger.keep(RowKind.MOVE, move.name, move.payer, move.kept_bytes)
        if move.access_id:
            self.index_access(move, move.access_id)

    def index_access(self, move: Move, access_id: bytes) -> None:
        """Gives the move a new access. Access ids are random, so each is new in the table."""
        assert access_id not in self._by_access, "an access id comes twice"
        self.drop_access(move)
        move.access_id = access_id
        self._by_access[access_id] = move

    def drop_access(self, move: Move) -> None:
        """Removes the move's access, because the peer knows that it is over."""
        self._unlist_access(move)
        move.access_id = b""

    def over(self, move: Move) -> None:
        """Stops all waits of the move. Its postings may go on."""
        self._stepping.pop(move.name, None)
        address = move.claims.address
        _take_out(move.name, (self._by_address, address), (self._unmapped, address))

    def remove(self, move: Move) -> None:
        """Forgets a move."""
        del self._by_name[move.name]
        self._ledger.drop(RowKind.MOVE, move.name)
        self._unlist_access(move)
        self._stepping.pop(move.name, None)
        self._leave(move)

    def weigh(self, move: Move) -> None:
        """Updates the weight of a move that has other blocks."""
        self._ledger.weigh(RowKind.MOVE, move.name, move.kept_bytes)

    @property
    def kept_bytes(self) -> dict[Hashable, int]:
        """Estimated bytes of each move, by name."""
        return {move.name: move.kept_bytes for move in self._by_name.values()}

    def find(self, name: str) -> Move | None:
        return self._by_name.get(name)

    def of_access(self, access_id: bytes) -> Move | None:
        return self._by_access.get(access_id)

    def of_peer(self, peer: str) -> list[Move]:
        """Returns the moves with an access at a peer's life, oldest first."""
        return list(self._by_peer.get(peer, {}).values())

    def await_address(self, move: Move) -> None:
        """Makes the move wait for the lead at the address of its other side."""
        self._leave(move)
        move.peer = ""
        self._by_address.setdefault(move.claims.address, {})[move.name] = move

    def take_address(self, address: str) -> list[Move]:
        """Returns the moves that waited for an address, and stops their wait."""
        return list(self._by_address.pop(address, {}).values())

    def bind(self, move: Move, peer: str) -> None:
        """Binds the move to the life of its peer."""
        self._leave(move)
        move.peer = peer
        self._by_peer.setdefault(peer, {})[move.name] = move

    def await_mapping(self, move: Move) -> None:
        """Makes the move wait for the mapping of its peer only."""
        self._unmapped.setdefault(move.claims.address, {})[move.name] = move

    def take_unmapped(self, address: str) -> list[Move]:
        """Returns the moves that waited for the mapping of the peer at an address, and stops their wait."""
        return list(self._unmapped.pop(address, {}).values())

    def await_step(self, move: Move) -> None:
        """Makes the move wait for its engine's step only."""
        self._stepping[move.name] = move

    def take_stepping(self) -> list[Move]:
        """Returns the moves that waited for a step, and stops their wait."""
        found = list(self._stepping.values())
        self._stepping.clear()
        return found

    def posted(self, move: Move, posting_id: str) -> None:
        """Records a posting in flight and ends the move's other waits. Its peer may still be reached again."""
        self._unmapped.get(move.claims.address, {}).pop(move.name, None)
        self._stepping.pop(move.name, None)
        move.postings.add(posting_id)
        self._by_posting[posting_id] = move

    def of_posting(self, posting_id: str) -> Move | None:
        """Returns the move of a posting that is not over."""
        return self._by_posting.get(posting_id)

    def oldest_in_flight(self) -> Move | None:
        """Returns the move whose posting has been in flight longest. A lost posting is not in flight."""
        return next((move for id_, move in self._by_posting.items() if id_ not in move.unproved), None)

    def posting_over(self, move: Move, posting_id: str) -> None:
        """Records that a posting accesses memory no more."""
        del self._by_posting[posting_id]
        move.postings.discard(posting_id)
        move.unproved.discard(posting_id)

    def open_accesses(self, peer: str) -> int:
        """Returns the number of accesses that this engine has open at a peer's life."""
        return sum(move.stage in AT_ISSUER for move in self._by_peer.get(peer, {}).values())

    def left(self) -> dict[str, int]:
        """Returns the number of rows in each index."""
        return {name[1:]: len(index) for name, index in vars(self).items() if isinstance(index, dict)}

    def __iter__(self) -> Iterator[Move]:
        """Iterates over a copy, oldest first, because moves may end meanwhile."""
        return iter(list(self._by_name.values()))

    def _unlist_access(self, move: Move) -> None:
        """The peer of a push names its own access, which may have the id of another move's access."""
        if self._by_access.get(move.access_id) is move:
            del self._by_access[move.access_id]

    def _leave(self, move: Move) -> None:
        address = move.claims.address
        _take_out(move.name, (self._by_address, address), (self._unmapped, address), (self._by_peer, move.peer))


def _take_out(name: str, *places: tuple[dict[str, dict[str, Move]], str]) -> None:
    """Removes a move's name from each index row, and removes rows that become empty."""
    for index, row in places:
        moves = index.get(row)
        if moves is not None:
            moves.pop(name, None)
            if not moves:
                del index[row]
