"""Tombstones: records of ended keys and grants, and of refused leases, which refuse late calls."""

from hashlib import sha256
from typing import Any, NamedTuple

from kvgrpc.core.tables.ledger import Ledger, RowKind
from kvgrpc.core.tables.remembered import Remembered
from kvgrpc.core.tables.timers import Timer, Timers
from kvgrpc.core.values.ids import check_transfer_key
from kvgrpc.core.values.owners import meet
from kvgrpc.errors import PreconditionFailed, Reason

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
        if known is not None and known.tenant != tenant:
            tenant = ""  # a later end of another tenant lifts no earlier one
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
