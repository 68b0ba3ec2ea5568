"""Tombstones: what is remembered of keys and grants under which something may come too late."""

from hashlib import sha256
from typing import NamedTuple, TypeVar

from kvgrpc.errors import PreconditionFailed, Reason

T = TypeVar("T")


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


def remember(table: dict[bytes, T], name: bytes, row: T, most: int) -> bytes | None:
    """Adds or replaces a row; the oldest one goes where there is no room for another. Its name, if it did."""
    oldest = next(iter(table)) if name not in table and len(table) >= most else None
    if oldest is not None:
        del table[oldest]
    table[name] = row
    return oldest
