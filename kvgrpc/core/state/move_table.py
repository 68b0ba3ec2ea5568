"""Moves that are not forgotten, of every kind, and every way to find them."""

from collections.abc import Hashable, Iterator

from kvgrpc.core.state.move import AT_ISSUER, Move
from kvgrpc.core.tables.ledger import Ledger, RowKind


class MoveTable:
    """Moves that are not forgotten, and every way to find them. One waits for an address, or is bound to a peer."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._ledger = ledger or Ledger()
        self._by_name: dict[str, Move] = {}
        self._by_access: dict[bytes, Move] = {}
        self._by_posting: dict[str, Move] = {}
        self._by_address: dict[str, dict[str, Move]] = {}
        """Those that wait for the lead at an address."""
        self._by_peer: dict[str, dict[str, Move]] = {}
        """Those with an access at that life of a peer, asked for or open."""
        self._unmapped: dict[str, dict[str, Move]] = {}
        """Those whose access is open, but whose peer must be mapped again, by its address."""
        self._stepping: dict[str, Move] = {}
        """Those that wait for the engine's step only."""

    def add(self, move: Move) -> None:
        """A new move."""
        self._by_name[move.name] = move
        self._ledger.keep(RowKind.MOVE, move.name, move.payer, move.kept_bytes)
        if move.access_id:
            self.index_access(move, move.access_id)

    def index_access(self, move: Move, access_id: bytes) -> None:
        """The move has that access from now on. Its id is random, so it is new too."""
        assert access_id not in self._by_access, "an access id comes twice"
        self.drop_access(move)
        move.access_id = access_id
        self._by_access[access_id] = move

    def drop_access(self, move: Move) -> None:
        """The peer knows that the move's access is over."""
        self._unlist_access(move)
        move.access_id = b""

    def over(self, move: Move) -> None:
        """The move waits for nothing any more, though its postings may go on."""
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
        """It has other blocks."""
        self._ledger.weigh(RowKind.MOVE, move.name, move.kept_bytes)

    @property
    def kept_bytes(self) -> dict[Hashable, int]:
        """What each move weighs."""
        return {move.name: move.kept_bytes for move in self._by_name.values()}

    def find(self, name: str) -> Move | None:
        return self._by_name.get(name)

    def of_access(self, access_id: bytes) -> Move | None:
        return self._by_access.get(access_id)

    def of_peer(self, peer: str) -> list[Move]:
        """Those with an access at that life of a peer, oldest first."""
        return list(self._by_peer.get(peer, {}).values())

    def await_address(self, move: Move) -> None:
        """The move waits for the lead at the address of its other side."""
        self._leave(move)
        move.peer = ""
        self._by_address.setdefault(move.claims.address, {})[move.name] = move

    def take_address(self, address: str) -> list[Move]:
        """Those that waited for an address; they wait no longer."""
        return list(self._by_address.pop(address, {}).values())

    def bind(self, move: Move, peer: str) -> None:
        """The move has found its peer."""
        self._leave(move)
        move.peer = peer
        self._by_peer.setdefault(peer, {})[move.name] = move

    def await_mapping(self, move: Move) -> None:
        """The move misses nothing but the mapping of its peer."""
        self._unmapped.setdefault(move.claims.address, {})[move.name] = move

    def take_unmapped(self, address: str) -> list[Move]:
        """Those that waited for the mapping of the peer at an address; they wait no longer."""
        return list(self._unmapped.pop(address, {}).values())

    def await_step(self, move: Move) -> None:
        """The move misses nothing but its engine's step."""
        self._stepping[move.name] = move

    def take_stepping(self) -> list[Move]:
        """Those that waited for a step; they wait no longer."""
        found = list(self._stepping.values())
        self._stepping.clear()
        return found

    def posted(self, move: Move, posting_id: str) -> None:
        """A posting of the move is in flight: it waits for nothing else, though the peer may still be reached anew."""
        self._unmapped.get(move.claims.address, {}).pop(move.name, None)
        self._stepping.pop(move.name, None)
        move.postings.add(posting_id)
        self._by_posting[posting_id] = move

    def of_posting(self, posting_id: str) -> Move | None:
        """The move of a posting that is not over."""
        return self._by_posting.get(posting_id)

    def oldest_in_flight(self) -> Move | None:
        """The move whose posting is in flight for the longest time; one that was lost is not in flight."""
        return next((move for id_, move in self._by_posting.items() if id_ not in move.unproved), None)

    def posting_over(self, move: Move, posting_id: str) -> None:
        """A posting of the move accesses memory no more."""
        del self._by_posting[posting_id]
        move.postings.discard(posting_id)
        move.unproved.discard(posting_id)

    def open_accesses(self, peer: str) -> int:
        """Accesses that this engine has open at that life of a peer."""
        return sum(move.stage in AT_ISSUER for move in self._by_peer.get(peer, {}).values())

    def left(self) -> dict[str, int]:
        """How many moves each index still has."""
        return {name[1:]: len(index) for name, index in vars(self).items() if isinstance(index, dict)}

    def __iter__(self) -> Iterator[Move]:
        """All, oldest first; they may end meanwhile."""
        return iter(list(self._by_name.values()))

    def _unlist_access(self, move: Move) -> None:
        """The peer of a push that writes here names its own access, which may be one of another move."""
        if self._by_access.get(move.access_id) is move:
            del self._by_access[move.access_id]

    def _leave(self, move: Move) -> None:
        address = move.claims.address
        _take_out(move.name, (self._by_address, address), (self._unmapped, address), (self._by_peer, move.peer))


def _take_out(name: str, *places: tuple[dict[str, dict[str, Move]], str]) -> None:
    """A move's name, from each index and its row there; no row is left empty."""
    for index, row in places:
        moves = index.get(row)
        if moves is not None:
            moves.pop(name, None)
            if not moves:
                del index[row]
