"""Remembered rows: what a late caller is told about things that are over, for a while and within a bound.

Rows of things that still live are not remembered rows: they end by their own rules. A table whose rule for forgetting
is another one says so in its docstring. Tombstones are remembered rows of ended keys and grants, and of refused leases,
which refuse late calls.
"""

from collections.abc import Hashable
from hashlib import sha256
from math import inf
from typing import Any, NamedTuple, TypeVar

from kvgrpc.core.tables.ledger import Ledger, RowKind
from kvgrpc.core.tables.timers import Timer, Timers
from kvgrpc.core.values.ids import check_transfer_key
from kvgrpc.core.values.owners import meet
from kvgrpc.errors import PreconditionFailed, Reason

ROW_BYTES = 1_000
"""Estimated bytes of a row beside what its table states: its name, its error and its deadline."""
Name = TypeVar("Name", bound=Hashable)
Row = TypeVar("Row")


class Remembered(dict[Name, Row]):
    """Rows by name, oldest first, bounded by number, bytes and time.

    A row is forgotten `kept_s` after it was added last. Beyond `most` rows, or `Limits.remembered_bytes` bytes in this
    table, the oldest rows are forgotten early. The newest row always stays unless `most` is 0, so nobody is refused for
    lack of room. Readers use the table as a dictionary. Only `add`, `drop` and `expire` change it.
    """

    def __init__(
        self, most: int, kept_s: float = inf, ledger: Ledger | None = None, kind: RowKind | None = None
    ) -> None:
        """Without a `kind` its bytes are in no ledger."""
        super().__init__()
        self._most, self._kept_s = most, kept_s
        self._ledger, self._kind = ledger or Ledger(), kind
        self._kept: dict[Name, tuple[float, int]] = {}
        """Time until which each row is remembered, and its bytes, in the order of the rows."""
        self.nbytes = 0
        """Sum of the bytes of all rows. Read-only outside."""

    def enter(self, ledger: Ledger) -> None:
        """Enters all rows into a new life's ledger."""
        self._ledger = ledger
        self._weigh(self.nbytes)

    def add(self, name: Name, row: Row, now: float, nbytes: int = 0) -> None:
        """Adds or replaces a row, as the newest one. `nbytes` are its bytes beside `ROW_BYTES`."""
        nbytes += ROW_BYTES
        if name in self:
            self.drop(name)
        if not self._most:
            return
        most_bytes = self._ledger.limits.remembered_bytes
        while self and (len(self) >= self._most or self.nbytes + nbytes > most_bytes):
            self.drop(next(iter(self)))
        self[name] = row
        self._kept[name] = now + self._kept_s, nbytes
        self.nbytes += nbytes
        self._weigh(nbytes)

    def drop(self, name: Name) -> None:
        """Forgets a row, if there is one."""
        kept = self._kept.pop(name, None)
        if kept is not None:
            del self[name]
            self.nbytes -= kept[1]
            self._weigh(-kept[1])

    def expire(self, now: float) -> None:
        """Forgets rows whose time is over."""
        while (until := self.next_deadline()) is not None and until <= now:
            self.drop(next(iter(self)))

    def next_deadline(self) -> float | None:
        """Returns the time at which the oldest row is to be forgotten, or None."""
        return next(iter(self._kept.values()))[0] if self._kept else None

    def _weigh(self, nbytes: int) -> None:
        if self._kind is not None:
            self._ledger.remember(self._kind, nbytes)


KEYS, GRANTS, LEASES = "keys", "grants", "leases"
"""Names of the tables, for their deadlines."""


class Tombstone(NamedTuple):
    """The refusal of calls under an ended transfer key."""

    error: PreconditionFailed
    parts_only: bool
    """True when it refuses only parts of a push, until a destination registers for one."""
    tenant: str = ""
    """Tenant of who ended the key. Empty for the house, and where several tenants did."""


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


class Tombstones:
    """The tombstones of one life. Each is remembered for the registration timeout."""

    def __init__(self, ledger: Ledger, timers: Timers) -> None:
        limits = ledger.limits
        self._timers = timers
        bound = limits.tombstones, limits.registration_timeout_s, ledger, RowKind.TOMBSTONE
        self.keys = Remembered[bytes, Tombstone](*bound)
        """Transfer keys under which something may still come too late. Read-only outside, as are the next two."""
        self.grants = Remembered[bytes, PreconditionFailed](*bound)
        """Digests of WRITE grants whose push is over -> error for calls that use them."""
        self.leases = Remembered[str, None](*bound)
        """Ids of leases whose hand-over was refused."""
        self.cancelled = 0
        """Number of times that a key was cancelled in this life. Read-only outside."""
        self._tables: dict[str, Remembered[Any, Any]] = {KEYS: self.keys, GRANTS: self.grants, LEASES: self.leases}

    @property
    def nbytes(self) -> int:
        """Bytes of all tombstones."""
        return sum(table.nbytes for table in self._tables.values())

    def check_key(self, key: bytes, *, begins: bool = True, tenant: str = "") -> None:
        """Raises PreconditionFailed for a refused transfer key: CANCELLED, SOURCE_FAILED when the source gave up, or
        TRANSFER_ENDED or LEASE_RECLAIMED when the push is over. `begins` means that the call cannot be a late part of
        an ended push. A key that another tenant ended is not refused to `tenant`.
        """
        known = self.keys.get(key)
        if known is not None and meet(known.tenant, tenant) and not (begins and known.parts_only):
            raise PreconditionFailed(known.error.reason, known.error.sentence)

    def check_grant(self, token: bytes) -> None:
        """Raises PreconditionFailed for a WRITE grant whose push is over, as `check_key` does."""
        known = self.grants.get(digest_of(token))
        if known is not None:
            raise PreconditionFailed(known.reason, known.message)

    def end_key(
        self,
        key: bytes,
        message: str,
        now: float,
        reason: Reason = Reason.CANCELLED,
        *,
        parts_only: bool = False,
        tenant: str = "",
    ) -> None:
        """Refuses calls under that key for a while. `parts_only` refuses only parts of a push, until a destination
        registers for one. `tenant` is that of who ends the key.
        """
        check_transfer_key(key)
        known = self.keys.get(key)
        if known is not None and known.tenant != tenant:  # a later end of another tenant lifts no earlier one
            tenant, parts_only = "", parts_only and known.parts_only
        self.cancelled += reason is Reason.CANCELLED
        self.keys.add(key, Tombstone(too_late(reason, message), parts_only, tenant), now, len(key) + len(message))
        self._arm(KEYS)

    def end_grant(self, token: bytes, message: str, now: float, reason: Reason) -> None:
        """Refuses that WRITE grant for a while."""
        name = digest_of(token)
        self.grants.add(name, too_late(reason, message), now, len(name) + len(message))
        self._arm(GRANTS)

    def refuse_lease(self, lease_id: str, now: float) -> None:
        """Refuses accesses on a lease that never began, for a while."""
        self.leases.add(lease_id, None, now, len(lease_id))
        self._arm(LEASES)

    def lift_key(self, key: bytes) -> None:
        """Accepts the key again, because its request is begun again."""
        if key in self.keys:
            self.keys.drop(key)
            self._arm(KEYS)

    def let_retry(self, key: bytes) -> None:
        """Lets an ended request be tried again under its key, unless it was cancelled."""
        known = self.keys.get(key)
        if known is not None and known.error.reason is not Reason.CANCELLED:
            self.lift_key(key)

    def expire(self, table: str, now: float) -> None:
        """Forgets the rows of a table whose time is over."""
        self._tables[table].expire(now)
        self._arm(table)

    def _arm(self, table: str) -> None:
        """Sets the deadline of a table's oldest row."""
        when = self._tables[table].next_deadline()
        if when is None:
            self._timers.clear(Timer.TOMBSTONE, table)
        else:
            self._timers.set(Timer.TOMBSTONE, table, when)


class ClosedAccessIds:
    """Ids of accesses that are over, at most `most` in each generation. A late message does not open such an access
    again: nothing would close it.

    An id is remembered for one to two registration timeouts. The table is no `Remembered`: every access of a peer adds
    an id, so only ids are kept, without times and weights, in two generations that are forgotten whole.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._younger: set[bytes] = set()
        self._older: set[bytes] = set()

    def add(self, access_id: bytes) -> bool:
        """Adds an access that is over. When there are too many, the older half is forgotten early. Returns True when a
        generation begins, whose timer must be set.
        """
        if len(self._younger) >= self._most:
            self.turn()
        self._younger.add(access_id)
        return len(self._younger) == 1

    def turn(self) -> bool:
        """Ends a generation. Returns True when another one begins, whose timer must be set."""
        self._older, self._younger = self._younger, set()
        return bool(self._older)

    def __contains__(self, access_id: bytes) -> bool:
        return access_id in self._younger or access_id in self._older
