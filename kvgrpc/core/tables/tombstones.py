"""Tombstones: what is remembered of keys and grants under which something may come too late."""

from hashlib import sha256
from typing import NamedTuple, TypeVar

from kvgrpc.core.tables.ledger import Ledger, RowKind
from kvgrpc.errors import PreconditionFailed, Reason

Name = TypeVar("Name", str, bytes)
T = TypeVar("T")
TOMBSTONE_BYTES = 1_000
"""Of one, without its texts: with its error, its deadline, and its row in the ledger."""


class Tombstone(NamedTuple):
    """What is said of a transfer key under which nothing may come for a while."""

    error: PreconditionFailed
    parts_only: bool
    """It is said of parts of a push only, until a destination registers for one."""


_SAID = {
    Reason.CANCELLED: "this transfer was cancelled: ",
    Reason.SOURCE_FAILED: "the source of this push has given up: ",
    Reason.TRANSFER_ENDED: "this push is over: ",
    Reason.LEASE_RECLAIMED: "this push is over: ",
}


def too_late(reason: Reason, message: str) -> PreconditionFailed:
    """The error for what comes after the end: CANCELLED, SOURCE_FAILED, LEASE_RECLAIMED or TRANSFER_ENDED."""
    return PreconditionFailed(reason, _SAID[reason] + message)


def digest_of(token: bytes) -> bytes:
    """What a grant is remembered by."""
    return sha256(token).digest()


class Tombstones(dict[Name, T]):
    """What is remembered of one kind of names, oldest first."""

    def __init__(self, what: str, ledger: Ledger) -> None:
        super().__init__()
        self._what, self._ledger = what, ledger
        self._nbytes = 0

    def bury(self, name: Name, row: T, nbytes: int) -> list[Name]:
        """Adds or replaces a row with so many bytes of text. The names of those that had to make room, oldest first."""
        gone, limits = list[Name](), self._ledger.limits
        nbytes += TOMBSTONE_BYTES + len(name)
        if name in self:
            self._weigh(name, 0)
        while self and (len(self) + (name not in self) > limits.tombstones or self._lacks(nbytes)):
            gone.append(next(iter(self)))
            del self[gone[-1]]
        self[name] = row
        self._weigh(name, nbytes)
        return gone

    def __delitem__(self, name: Name) -> None:
        self._weigh(name, 0)
        super().__delitem__(name)  # type: ignore[arg-type, unused-ignore]

    def _lacks(self, nbytes: int) -> bool:
        return self._nbytes + nbytes > self._ledger.limits.remembered_bytes

    def _weigh(self, name: Name, nbytes: int) -> None:
        row = (self._what, name)
        self._nbytes += nbytes - self._ledger.nbytes(RowKind.TOMBSTONE, row)
        if nbytes:
            self._ledger.keep(RowKind.TOMBSTONE, row, "", nbytes)
        else:
            self._ledger.drop(RowKind.TOMBSTONE, row)
