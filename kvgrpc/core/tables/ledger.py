"""The ledger: how many bytes a lead keeps, for which kind of row and for which payer.

Every row that outlives its call is entered with an estimate of its memory, and leaves with the row. There are three
shares: rows made by callers of the public API, rows made by peers under their grants, and rows made by the attached
engine's session. No share can use up another one. One caller, tenant or peer may use only a part of its share; a tenant
also only a part of the number of rows of a kind. Rows about ended things are in no share. Beyond the bound of their
table the oldest row is forgotten, and nobody is refused.
"""

from collections import Counter
from collections.abc import Hashable, Iterator
from enum import Enum

from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.owners import ENGINE_SIDE, PEER, tenant_of
from kvgrpc.errors import Exhausted, Reason, full

RETRY_DELAY_S = 1.0
TEXT_BYTES = 64
"""Estimated bytes of a text beside its characters."""


class RowKind(Enum):
    """Kinds of rows."""

    # Hashes by identity, as `timers.Timer` does.
    __hash__ = object.__hash__

    LEASE = "lease"
    """A lease with its blocks, its pin and its content."""
    TRANSFER = "transfer"
    MOVE = "move"
    """A pull, a reservation, or a destination of a push, with the blocks of both sides."""
    PUSH = "push"
    """A push with its parts, its content and all destinations that ever came."""
    PARTS = "parts"
    """Parts of a push that its source told a destination."""
    ACCESS = "access"
    OPENING = "opening"
    """A call of a peer whose accesses wait."""
    ALLOCATION = "allocation"
    KEY = "key"
    """An idempotency key with its reply."""
    REQUEST = "request"
    """A scheduler's request with its prompt."""
    NEWS = "news"
    """News that a scheduler has not read."""
    TENSOR = "tensor"
    """The description of a tensor that is here or kept for others."""
    TENSOR_WAIT = "tensor_wait"
    TENSOR_ENDED = "tensor_ended"
    CLOSE = "close"
    """The close of an access of ours that its issuer has not answered."""
    ENDED_LEASE = "ended_lease"
    PAST_TRANSFER = "past_transfer"
    TOMBSTONE = "tombstone"
    """The tombstone of a transfer key, a grant or a lease."""


REMEMBERED = frozenset(
    {RowKind.TENSOR_ENDED, RowKind.CLOSE, RowKind.ENDED_LEASE, RowKind.PAST_TRANSFER, RowKind.TOMBSTONE}
)
"""Kinds of rows about ended things. Only their sum is known here."""


class LedgerShare(Enum):
    """The three shares of the kept bytes."""

    # Hashes by identity, as `timers.Timer` does.
    __hash__ = object.__hash__

    CALLERS = "callers"
    PEERS = "peers"
    ENGINE = "engine"


class Ledger:
    """The bytes kept in one life, without those of pools."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._rows: dict[RowKind, dict[Hashable, tuple[str, int]]] = {
            kind: {} for kind in RowKind if kind not in REMEMBERED
        }
        """Payer and bytes of each row."""
        self._shares: dict[str, LedgerShare] = {}
        self.by_kind: dict[RowKind, int] = dict.fromkeys(RowKind, 0)
        """Read-only outside, as are the next four attributes."""
        self.by_share: dict[LedgerShare, int] = dict.fromkeys(LedgerShare, 0)
        self.by_payer: dict[str, int] = {}
        self.by_tenant: dict[str, int] = {}
        self.rows_of_tenant: dict[tuple[RowKind, str], int] = {}
        """Number of rows by kind and tenant, for tenants that have some."""

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())

    def check(self, payer: str, nbytes: int) -> None:
        """Raises Exhausted (LIMIT_EXCEEDED) when `nbytes` more bytes of that payer are too many."""
        share, limits = self._shares.get(payer) or share_of(payer), self.limits
        mine, most = self.by_payer.get(payer, 0), limits.kept_bytes_per_caller
        if share is not LedgerShare.ENGINE and mine + nbytes > most:
            who = "this caller's calls" if share is LedgerShare.CALLERS else "this peer's calls"
            raise _full(who, mine, nbytes, most)
        if (tenant := tenant_of(payer)) and (theirs := self.by_tenant.get(tenant, 0)) + nbytes > (
            of_tenant := limits.of_tenant(limits.kept_bytes)
        ):
            raise _full("the calls of this tenant", theirs, nbytes, of_tenant)
        most = limits.engine_kept_bytes if share is LedgerShare.ENGINE else limits.kept_bytes
        if (all_of_them := self.by_share[share]) + nbytes > most:
            raise _full(f"the calls of {_WHO[share]}", all_of_them, nbytes, most)

    def check_rows(self, kind: RowKind, payer: str, most: int, count: int = 1) -> None:
        """Raises Exhausted (LIMIT_EXCEEDED) when `count` more rows of that kind are more than the share of `most` rows
        that the payer's tenant has.
        """
        if not (tenant := tenant_of(payer)):
            return
        theirs = self.rows_of_tenant.get((kind, tenant), 0)
        if theirs + count > (of_tenant := self.limits.of_tenant(most)):
            text = f"this tenant has {theirs} {kind.value}s here; its share of {most} is {of_tenant}: let some end"
            raise full(text, of_tenant)

    def keep(self, kind: RowKind, name: Hashable, payer: str, nbytes: int) -> None:
        """Adds or replaces a row without a check: there was room for it, or it may not be refused."""
        rows = self._rows[kind]
        if name in rows:
            self.drop(kind, name)
        rows[name] = payer, nbytes
        self.by_kind[kind] += nbytes
        if payer in self.by_payer:
            self.by_payer[payer] += nbytes
        else:
            self._shares[payer] = share_of(payer)
            self.by_payer[payer] = nbytes
        self.by_share[self._shares[payer]] += nbytes
        if tenant := tenant_of(payer):
            self._charge(tenant, nbytes, kind, 1)

    def _charge(self, tenant: str, nbytes: int, kind: RowKind, rows: int) -> None:
        """Adds bytes and rows, or takes them away, at a tenant."""
        left = self.by_tenant[tenant] = self.by_tenant.get(tenant, 0) + nbytes
        if not left:
            del self.by_tenant[tenant]
        left = self.rows_of_tenant[kind, tenant] = self.rows_of_tenant.get((kind, tenant), 0) + rows
        if not left:
            del self.rows_of_tenant[kind, tenant]

    def enter(self, kind: RowKind, name: Hashable, payer: str, nbytes: int) -> None:
        """Adds or replaces a row if there is room. Raises as `check`."""
        self.check(payer, nbytes)
        self.keep(kind, name, payer, nbytes)

    def weigh(self, kind: RowKind, name: Hashable, nbytes: int) -> None:
        """Changes the bytes of a row."""
        payer, before = self._rows[kind][name]
        if nbytes != before:
            self._rows[kind][name] = payer, nbytes
            self.by_kind[kind] += nbytes - before
            self.by_payer[payer] += nbytes - before
            self.by_share[self._shares[payer]] += nbytes - before
            if tenant := tenant_of(payer):
                self._charge(tenant, nbytes - before, kind, 0)

    def payer(self, kind: RowKind, name: Hashable) -> str:
        return self._rows[kind][name][0]

    def drop(self, kind: RowKind, name: Hashable) -> None:
        """Removes a row, if there is one."""
        row = self._rows[kind].pop(name, None)
        if row is None:
            return
        payer, nbytes = row
        self.by_kind[kind] -= nbytes
        self.by_share[self._shares[payer]] -= nbytes
        self.by_payer[payer] -= nbytes
        if tenant := tenant_of(payer):
            self._charge(tenant, -nbytes, kind, -1)
        if not self.by_payer[payer]:
            del self.by_payer[payer], self._shares[payer]

    def remember(self, kind: RowKind, nbytes: int) -> None:
        """Adds bytes of rows about ended things, or with a negative number removes them. Their table has the rows."""
        self.by_kind[kind] += nbytes

    def nbytes(self, kind: RowKind, name: Hashable) -> int:
        """Returns the bytes of a row, or 0 when there is none."""
        row = self._rows[kind].get(name)
        return 0 if row is None else row[1]

    def rows(self, kind: RowKind) -> dict[Hashable, int]:
        """Returns the bytes of each row of a kind."""
        return {name: nbytes for name, (_, nbytes) in self._rows[kind].items()}

    def largest(self, most: int) -> Iterator[tuple[str, int]]:
        """Returns the `most` payers with the most bytes, and their bytes."""
        return iter(sorted(self.by_payer.items(), key=lambda row: (-row[1], row[0]))[:most])

    def check_sums(self) -> None:
        """Asserts that all sums match the rows. For tests and simulators."""
        by_share, by_payer, by_tenant = dict.fromkeys(LedgerShare, 0), dict[str, int](), dict[str, int]()
        rows_of_tenant = Counter[tuple[RowKind, str]]()
        for kind, rows in self._rows.items():
            assert self.by_kind[kind] == sum(nbytes for _, nbytes in rows.values()), kind
            for payer, nbytes in rows.values():
                by_payer[payer] = by_payer.get(payer, 0) + nbytes
                by_share[share_of(payer)] += nbytes
                if tenant := tenant_of(payer):
                    by_tenant[tenant] = by_tenant.get(tenant, 0) + nbytes
                    rows_of_tenant[kind, tenant] += 1
        assert (self.by_share, self.by_payer, self.by_tenant) == (by_share, by_payer, by_tenant)
        assert self.rows_of_tenant == rows_of_tenant


_WHO = {LedgerShare.CALLERS: "all callers", LedgerShare.PEERS: "all peers", LedgerShare.ENGINE: "the attached engine"}


def share_of(payer: str) -> LedgerShare:
    if payer in ENGINE_SIDE:
        return LedgerShare.ENGINE
    return LedgerShare.PEERS if payer.startswith(PEER) else LedgerShare.CALLERS


def texts_bytes(*texts: str | bytes) -> int:
    """Estimates the bytes of texts. A character may take four bytes, but most take one."""
    return sum([TEXT_BYTES + len(text) for text in texts])


def _full(whose: str, kept: int, nbytes: int, limit: int) -> Exhausted:
    return Exhausted(
        Reason.LIMIT_EXCEEDED,
        f"what {whose} made here keeps {kept} bytes; with {nbytes} more it would be over {limit}. What has ended makes "
        "room: leases, transfers, allocations and requests",
        retry_delay_s=RETRY_DELAY_S,
        metadata={"limit": str(limit), "kept_bytes": str(kept)},
    )
