"""Tombstones: records of ended keys, grants and leases, which refuse late calls."""

from hashlib import sha256
from typing import NamedTuple, TypeVar

from kvgrpc.core.tables.ledger import Ledger, RowKind
from kvgrpc.errors import PreconditionFailed, Reason

Name = TypeVar("Name", str, bytes)
T = TypeVar("T")
TOMBSTONE_BYTES = 1_000
"""Estimated bytes of a tombstone without its texts: its error, its deadline and its row in the ledger."""


class Tombstone(NamedTuple):
    """The refusal of calls under an ended transfer key."""

    error: PreconditionFailed
    parts_only: bool
    """True when it refuses only parts of a push, until a destination registers for one."""


_SAID = {
    Reason.CANCELLED: "this transfer was cancelled: ",
    Reason.SOURCE_FAILED: "the source of this push has given up: ",
    Reason.TRANSFER_ENDED: "this push is over: ",
    Reason.LEASE_RECLAIMED: "this push is over: ",
}


def too_late(reason: Reason, message: str) -> PreconditionFailed:
    """Returns the error for a call after the end: CANCELLED, SOURCE_FAILED, LEASE_RECLAIMED or TRANSFER_ENDED."""
    return PreconditionFailed(reason, _SAID[reason] + message)


def digest_of(token: bytes) -> bytes:
    """Returns the name under which a grant is remembered."""
    return sha256(token).digest()


class Tombstones(dict[Name, T]):
    """Remembered names of one kind, oldest first."""

    def __init__(self, what: str, ledger: Ledger) -> None:
        super().__init__()
        self._what, self._ledger = what, ledger
        self._nbytes = 0

    def bury(self, name: Name, row: T, nbytes: int) -> list[Name]:
        """Adds or replaces a row with `nbytes` bytes of text. Returns the names of removed rows, oldest first."""
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
