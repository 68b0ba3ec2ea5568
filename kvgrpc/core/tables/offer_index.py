"""The index of offers: which live leases can be found by their content, by tenant and by the digests of their chains.

A row stands for a unit and its digest, of one tenant: it has the offers whose tokens up to the end of the unit have
that digest and can be pulled alone. Equal digests mean equal beginnings, so the longest beginning is the last unit of a
caller's chain that has a row. The rows of one tenant are apart from those of another one.

Digests are what callers state. The unit is a part of the row's name, because a list of digests that is no chain may
have one digest in many places, and a search must look at no more than one row for each unit.

Watchers read what has changed since a number. Offers that began since then are those that still live; only numbers of
ended ones are kept, the latest `ENDED_KEPT`.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from kvgrpc.core.values.content import DIGEST_BYTES, UNIT_TOKENS, ContentId
from kvgrpc.core.values.groups import Group
from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.records import dataclass
from kvgrpc.errors import full

UNITS_MAX = 131_072
"""Maximum number of units of all offers together: about two million tokens. A tenant has its share."""
UNIT_BYTES = 320
"""Estimated bytes of one unit of one offer: a row with its digest, and the offer in it."""
ENDED_KEPT = 4_096
"""Number of ended offers that are remembered for watchers."""
STEP_UNITS = 16
"""Number of units between two digests that watchers are told. Routers' indexes keep the same ones."""


def first_unit(groups: Sequence[Group], content: ContentId) -> int:
    """Returns the first unit, counted from 1, up to which the blocks of a chain can be pulled alone.

    A group with a window holds its last tokens, and a state group one state: these serve only the last units.
    """
    units = range(1, len(content.digests) // DIGEST_BYTES + 1)

    def serves(unit: int) -> bool:
        prefix = min(unit * UNIT_TOKENS, content.tokens)
        return all(group.stands_for(content.tokens, prefix) for group in groups)

    return units[bisect_left(units, True, key=serves)]


def indexed_bytes(content: ContentId) -> int:
    """Returns the estimated bytes of a content in the index at most."""
    return len(content.digests) // DIGEST_BYTES * UNIT_BYTES


@dataclass(frozen=True, eq=False)
class IndexedOffer:
    """A live lease that can be found."""

    number: int
    """Number of the change by which it began."""
    lease_id: str
    tenant: str
    content: ContentId
    first_unit: int
    """The first unit up to which it can be pulled alone, counted from 1; it can up to all later ones, too."""

    @property
    def units(self) -> range:
        """The units up to which it can be pulled alone."""
        return range(self.first_unit, len(self.content.digests) // DIGEST_BYTES + 1)

    @property
    def rows(self) -> list[bytes]:
        """The names of the rows that it is in."""
        return [_row(self.content.digests, unit) for unit in self.units]

    @property
    def told_digests(self) -> bytes:
        """The digests that watchers are told: of unit 1 and of every `STEP_UNITS`-th one, as far as they have rows."""
        told = (1, *range(STEP_UNITS, self.units.stop, STEP_UNITS))
        return b"".join([_digest(self.content.digests, unit) for unit in told if unit in self.units])


class OfferChanges(NamedTuple):
    """Changes in the index of one tenant."""

    seq: int
    """Number of the last change of any tenant."""
    offered: tuple[IndexedOffer, ...]
    """Offers that began, oldest first, and still live."""
    ended: tuple[int, ...] = ()
    """Numbers of offers that ended, whether or not they were told."""


class OfferIndex:
    """The offers of one life."""

    def __init__(self, limits: Limits, most: int = UNITS_MAX) -> None:
        self._limits, self._most = limits, most
        self._offers: dict[str, IndexedOffer] = {}
        """Offers by lease, oldest first."""
        self._rows: dict[str, dict[bytes, dict[str, None]]] = {}
        """Leases of each row of each tenant, oldest first."""
        self._units: dict[str, int] = {}
        """Number of units of each tenant's offers."""
        self._total = 0
        self._ended: deque[tuple[int, int, str]] = deque()
        """Number of the change, number of the offer, and tenant of the latest offers that ended."""
        self._forgotten = 0
        """Number of the last change that is in `_ended` no longer."""
        self.seq = 0
        """Number of the last change. Read-only outside."""

    def check_room(self, tenant: str, units: int) -> None:
        """Raises Exhausted (LIMIT_EXCEEDED) if `units` more units of that tenant are too many."""
        most_of_one = self._limits.of_tenant(self._most) if tenant else self._most
        of_one = "this tenant's", self._units.get(tenant, 0), most_of_one
        for whose, held, most in (of_one, ("all", self._total, self._most)):
            if held + units > most:
                raise full(
                    f"{whose} offers that can be found have {held} units of 16 tokens; with {units} more they would be "
                    f"over {most}: let some end, or hand over without `findable`",
                    most,
                )

    def add(self, lease_id: str, tenant: str, content: ContentId, first_unit: int = 1) -> None:
        """Adds a lease that was checked for room. Its content is a chain."""
        self.seq += 1
        offer = self._offers[lease_id] = IndexedOffer(self.seq, lease_id, tenant, content, first_unit)
        rows = self._rows.setdefault(tenant, {})
        for row in offer.rows:
            rows.setdefault(row, {})[lease_id] = None
        self._count(tenant, len(offer.units))

    def remove(self, lease_id: str) -> None:
        offer = self._offers.pop(lease_id)
        rows = self._rows[offer.tenant]
        for row in offer.rows:
            leases = rows[row]
            del leases[lease_id]
            if not leases:
                del rows[row]
        if not rows:
            del self._rows[offer.tenant]
        self._count(offer.tenant, -len(offer.units))
        self.seq += 1
        self._ended.append((self.seq, offer.number, offer.tenant))
        if len(self._ended) > ENDED_KEPT:
            self._forgotten = self._ended.popleft()[0]

    def find(self, tenant: str, content: ContentId, most: int) -> tuple[int, tuple[str, ...]]:
        """Returns the number of units of the longest beginning of a chain that an offer of the tenant has, and at most
        `most` leases that have it, the newest first. (0, ()) if none has any.
        """
        rows = self._rows.get(tenant)
        if rows is not None:
            digests = content.digests
            for unit in range(len(digests) // DIGEST_BYTES, 0, -1):
                leases = rows.get(_row(digests, unit))
                if leases is not None:
                    return unit, tuple(islice(reversed(leases), most))
        return 0, ()

    def all_of(self, tenant: str) -> OfferChanges:
        return OfferChanges(self.seq, tuple([offer for offer in self if offer.tenant == tenant]))

    def changes_after(self, tenant: str, seq: int) -> OfferChanges | None:
        """Returns what has changed since the change number `seq`; None if that is no longer known."""
        if seq < self._forgotten:
            return None
        offered = []
        for offer in reversed(self._offers.values()):
            if offer.number <= seq:
                break
            if offer.tenant == tenant:
                offered.append(offer)
        ended = []
        for at, number, of_tenant in reversed(self._ended):
            if at <= seq:
                break
            if of_tenant == tenant:
                ended.append(number)
        return OfferChanges(self.seq, tuple(reversed(offered)), tuple(reversed(ended)))

    def __iter__(self) -> Iterator[IndexedOffer]:
        return iter(self._offers.values())

    def check(self) -> None:
        """Asserts that the rows are those of the offers. For tests and simulators."""
        rows: dict[str, dict[bytes, dict[str, None]]] = {}
        for offer in self:
            for row in offer.rows:
                rows.setdefault(offer.tenant, {}).setdefault(row, {})[offer.lease_id] = None
        assert rows == self._rows, "rows without an offer, or missing"
        assert all(map(bool, self._units.values()))
        assert self._total == sum(self._units.values()) == sum(len(offer.units) for offer in self)

    def _count(self, tenant: str, units: int) -> None:
        self._total += units
        left = self._units[tenant] = self._units.get(tenant, 0) + units
        if not left:
            del self._units[tenant]


def _row(digests: bytes, unit: int) -> bytes:
    """Returns the name of the row of a unit of a chain."""
    return _digest(digests, unit) + unit.to_bytes(4, "little")


def _digest(digests: bytes, unit: int) -> bytes:
    """Returns the digest that covers the tokens up to the end of a unit."""
    return digests[(unit - 1) * DIGEST_BYTES : unit * DIGEST_BYTES]
