"""The table of moves: all kinds of moves that are not forgotten, with every index to find them, and their turns.

The table of pushes has the registrations of their destinations.
"""

import heapq
from collections.abc import Hashable, Iterator
from itertools import count

from kvgrpc.core.state.move import AT_ISSUER, Move
from kvgrpc.core.state.push import Registration, SourcePush
from kvgrpc.core.state.waiting_rows import Closes
from kvgrpc.core.tables.ledger import Ledger, RowKind
from kvgrpc.core.values.grants import read_claims
from kvgrpc.errors import KVGrpcError


class Turns:
    """Turns of all moves of one engine, by the moves' names: higher priority first, then in the order of asking.

    A posting cannot be called back, so few bytes are posted at a time. Once the bytes in flight of a rank reach the
    bound, all others wait here. The next turn goes to the most important one, not to the one that was posted first.
    """

    def __init__(self, in_flight_bytes: int) -> None:
        self._most = in_flight_bytes
        self._in_flight: dict[str, int] = {}
        self.waiting: dict[str, int] = {}
        """Waiting moves, by name -> heap entry number. Other heap entries are stale. Read-only outside."""
        self._heap: list[tuple[int, int, str]] = []
        self._order = count()
        self.paused = False
        """True while no move gets a turn. Bytes in flight go on."""
        self._named = ""
        """The move `next` returned last, until it calls `take`."""
        self.nbytes = 0
        """Bytes in flight. Read-only outside."""

    def take(self, name: str, priority: int) -> bool:
        """Returns whether it is that move's turn. If not, the move waits, and asks again when `next` returns it."""
        if name == self._named:
            self._named = ""
            return True
        if name in self.waiting:
            return False
        if (
            not self.paused
            and self.nbytes < self._most
            and not (self._first() is not None and -self._heap[0][0] >= priority)
        ):
            return True
        number = self.waiting[name] = next(self._order)
        heapq.heappush(self._heap, (-priority, number, name))
        return False

    def left(self) -> dict[str, int]:
        """Returns the numbers of moves with bytes in flight and of waiting moves."""
        return {"in_flight": len(self._in_flight), "waiting": len(self.waiting)}

    def began(self, name: str, nbytes: int) -> None:
        """Counts a move's bytes as in flight."""
        self._in_flight[name] = self._in_flight.get(name, 0) + nbytes
        self.nbytes += nbytes

    def ended(self, name: str) -> None:
        """Counts a move's bytes as no longer in flight."""
        self.nbytes -= self._in_flight.pop(name, 0)

    def leave(self, name: str) -> None:
        """Forgets a move that is over: it does not wait, and its bytes in flight keep no other move waiting."""
        self.waiting.pop(name, None)
        self.ended(name)

    def next(self) -> str | None:
        """Returns the move whose turn it is, and ends its wait. Returns None when none waits or there is no room."""
        name = self._first() if self.nbytes < self._most and not self.paused else None
        if name is not None:
            heapq.heappop(self._heap)
            del self.waiting[name]
        self._named = name or ""
        return name

    def _first(self) -> str | None:
        while self._heap and self.waiting.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None


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
        self._by_name[move.name] = move
        self._ledger.keep(RowKind.MOVE, move.name, move.payer, move.kept_bytes)
        if move.access_id:
            assert move.access_id not in self._by_access, "an access id comes twice"
            self._by_access[move.access_id] = move

    def index_access(self, move: Move, access_id: bytes) -> None:
        """Gives the move a new access. Access ids are random, so each is new in the table."""
        assert access_id not in self._by_access, "an access id comes twice"
        self._unlist_access(move)
        move.access_id = access_id
        self._by_access[access_id] = move

    def drop_access(self, move: Move) -> None:
        """Removes the move's access, because the peer knows that it is over."""
        self._unlist_access(move)
        move.access_id = b""

    def over(self, move: Move) -> None:
        """Stops all waits of the move. Its postings may go on."""
        self._stepping.pop(move.name, None)
        self._leave(move, peer=False)

    def remove(self, move: Move) -> None:
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

    def _leave(self, move: Move, *, peer: bool = True) -> None:
        """Removes a move from its address, and from its peer if `peer` is set, and index rows that become empty."""
        address = move.claims.address
        rows = [(self._by_address, address), (self._unmapped, address)]
        if peer:
            rows.append((self._by_peer, move.peer))
        for index, row in rows:
            moves = index.get(row)
            if moves is not None:
                moves.pop(move.name, None)
                if not moves:
                    del index[row]


class PushTable:
    """All pushes. A registration is found by its grant or by either of its accesses."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._ledger = ledger or Ledger()
        self._by_id: dict[str, SourcePush] = {}
        self._by_key: dict[bytes, SourcePush] = {}
        self._by_access: dict[bytes, Registration] = {}
        self._by_reader: dict[bytes, Registration] = {}

    def begin(self, push: SourcePush) -> None:
        self._by_id[push.transfer_id] = self._by_key[push.key] = push
        self._ledger.keep(RowKind.PUSH, push.transfer_id, push.payer, push.kept_bytes)

    def weigh(self, push: SourcePush) -> None:
        """Updates the weight of a push that has other parts."""
        self._ledger.weigh(RowKind.PUSH, push.transfer_id, push.kept_bytes)

    @property
    def kept_bytes(self) -> dict[Hashable, int]:
        """Estimated bytes of each push, by transfer id."""
        return {push.transfer_id: push.kept_bytes for push in self._by_id.values()}

    def add(self, move: Registration) -> None:
        """Adds a destination that registered for a push."""
        move.push.registrations[move.token] = move
        self.weigh(move.push)
        self._by_access[move.access_id] = self._by_reader[move.reverse_id] = move

    def take_ids(self, move: Registration, access_id: bytes, reverse_id: bytes) -> None:
        """Gives the registration new access ids. The table of moves knows the new access already."""
        self.drop_access(move.access_id)
        del self._by_reader[move.reverse_id]
        move.reverse_id = reverse_id
        self._by_access[access_id] = self._by_reader[reverse_id] = move

    def drop_access(self, access_id: bytes) -> None:
        """Removes an access that the destination knows to be over."""
        self._by_access.pop(access_id, None)

    def remove(self, move: Registration) -> None:
        """Forgets a registration, and its push if nothing of that is left."""
        self.drop_access(move.access_id)
        del self._by_reader[move.reverse_id]
        move.opened = move.progress = None
        self.forget(move.push)

    def forget(self, push: SourcePush) -> None:
        """Forgets a push if it is over and our own postings do not read its blocks."""
        if push.over and not push.posting:
            self._by_id.pop(push.transfer_id, None)
            self._ledger.drop(RowKind.PUSH, push.transfer_id)
            if self._by_key.get(push.key) is push:
                del self._by_key[push.key]

    def find(self, transfer_id: str) -> SourcePush | None:
        return self._by_id.get(transfer_id)

    def with_key(self, key: bytes) -> SourcePush | None:
        """Returns the push under a key that is not over."""
        push = self._by_key.get(key)
        return push if push is not None and not push.over else None

    def with_lease(self, lease_id: str) -> SourcePush | None:
        """Returns the push whose present parts have that lease. The lease may have ended while postings go on."""
        return next((push for push in self._by_id.values() if push.lease_id == lease_id), None)

    def with_token(self, token: bytes) -> Registration | None:
        try:
            push = self._by_key.get(read_claims(token).transfer_key)
        except KVGrpcError:
            return None
        return push.registrations.get(token) if push is not None else None

    def of_access(self, access_id: bytes) -> Registration | None:
        """Returns the registration with that access at its destination."""
        return self._by_access.get(access_id)

    def of_reader(self, access_id: bytes) -> Registration | None:
        """Returns the registration whose destination reads under that access."""
        return self._by_reader.get(access_id)

    def left(self) -> dict[str, int]:
        """Returns the number of rows in each index."""
        return {name[1:]: len(index) for name, index in vars(self).items() if isinstance(index, dict)}

    def __iter__(self) -> Iterator[SourcePush]:
        """Iterates over a copy, oldest first, because pushes may end meanwhile."""
        return iter(list(self._by_id.values()))
