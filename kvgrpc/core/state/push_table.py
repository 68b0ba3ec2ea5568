"""The table of pushes and the registrations of their destinations."""

from collections.abc import Hashable, Iterator

from kvgrpc.core.state.push import Registration, SourcePush
from kvgrpc.core.tables.ledger import Ledger, RowKind
from kvgrpc.core.values.grants import read_claims
from kvgrpc.errors import KVGrpcError


class PushTable:
    """All pushes. A registration is found by its grant or by either of its accesses."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._ledger = ledger or Ledger()
        self._by_id: dict[str, SourcePush] = {}
        self._by_key: dict[bytes, SourcePush] = {}
        self._by_access: dict[bytes, Registration] = {}
        self._by_reader: dict[bytes, Registration] = {}

    def begin(self, push: SourcePush) -> None:
        """Adds a new push."""
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
        """Returns the push of a transfer."""
        return self._by_id.get(transfer_id)

    def with_key(self, key: bytes) -> SourcePush | None:
        """Returns the push under a key that is not over."""
        push = self._by_key.get(key)
        return push if push is not None and not push.over else None

    def with_lease(self, lease_id: str) -> SourcePush | None:
        """Returns the push whose present parts have that lease. The lease may have ended while postings go on."""
        return next((push for push in self._by_id.values() if push.lease_id == lease_id), None)

    def with_token(self, token: bytes) -> Registration | None:
        """Returns the registration of a grant."""
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
