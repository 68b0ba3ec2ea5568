"""The prefixes that leads offer, by the digests of content chains: what WatchOffers has told of all engines.

The index is approximate: it has one digest for `STEP_UNITS` units, and what it says may have ended. It is bounded,
whatever leads tell. When it is full, an engine that has told more than its share loses its oldest offers, so no engine
takes the place of others.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import islice

from kvgrpc.fleet.prefixes import LOOKS_MAX, STEP_UNITS, kept_units

DIGEST_BYTES = 32
OFFERED_MAX = 131_072
"""Maximum number of rows of the index. An offer takes one, and one more for each of its digests."""
OFFER_DIGESTS_MAX = 1 + 8_192 // STEP_UNITS
"""Number of digests that are kept of one offer: those of the 8,192 units that count for a choice."""
HOLDERS_MAX = 32
"""Maximum number of engines that one look-up finds, those with the longest prefixes first."""
KEPT_SHARE = 0.75
"""Part of its share that an engine keeps which loses offers for others."""
LOST_AT_ONCE = 512
"""Number of rows that an engine loses for one offer of another one, beside the rows that this offer takes."""


def tenant_part(tenant: str) -> bytes:
    """Returns what stands before each digest of a tenant, which then says nothing about prompts of other ones."""
    return sha256(tenant.encode(errors="replace")).digest() if tenant else b""


class OfferedPrefixes:
    """An index of the offers of all engines."""

    def __init__(self, most: int = OFFERED_MAX) -> None:
        self._most = most
        self._holders: dict[bytes, dict[str, int]] = {}
        """Number of offers of each engine that have a digest, the engine that came last at the end."""
        self._books: dict[OfferBook, None] = {}
        self._rows = 0

    def __len__(self) -> int:
        """Returns the number of rows."""
        return self._rows

    @property
    def engine_count(self) -> int:
        """Number of engines that offer something, once for each tenant."""
        return len(self._books)

    def book(self, engine_id: str, tenant: str = "") -> "OfferBook":
        """Returns the empty book of what one engine tells of one tenant."""
        return OfferBook(self, engine_id, tenant)

    def units_held(self, chain: Sequence[bytes]) -> dict[str, int]:
        """Returns how many first units of a chain each engine offers. Each digest has its `tenant_part`."""
        found: dict[str, int] = {}
        if not self._holders:
            return found
        for units in kept_units(len(chain))[::-1][:LOOKS_MAX]:
            holders = self._holders.get(chain[units - 1])
            if holders is not None:
                for engine_id in islice(reversed(holders), HOLDERS_MAX):
                    found.setdefault(engine_id, units)
                if len(found) >= HOLDERS_MAX:
                    break
        return found

    # -- for its books

    def put(self, book: "OfferBook", digests: Sequence[bytes]) -> None:
        """Adds the rows of one offer."""
        self._books[book] = None
        self._rows += 1 + len(digests)
        for digest in digests:
            holders = self._holders.setdefault(digest, {})
            holders[book.of[0]] = holders.pop(book.of[0], 0) + 1

    def take_out(self, book: "OfferBook", digests: Sequence[bytes]) -> None:
        """Removes the rows of one offer."""
        self._rows -= 1 + len(digests)
        for digest in digests:
            holders = self._holders[digest]
            holders[book.of[0]] -= 1
            if not holders[book.of[0]]:
                del holders[book.of[0]]
            if not holders:
                del self._holders[digest]
        if not book.rows:
            del self._books[book]

    def make_room(self, book: "OfferBook") -> None:
        """Lets engines with more than their share lose offers until the index is within its bound. `book` has grown."""
        while self._rows > self._most:
            share = self._most // len(self._books)
            if book.rows > share:
                book.lose_oldest()
                continue
            most = max(self._books, key=lambda one: one.rows)
            kept = max(share * KEPT_SHARE, most.rows - LOST_AT_ONCE)
            while most.rows > kept:
                most.lose_oldest()


class OfferBook:
    """Offers of one tenant that the lead of one engine has told (WatchOffers)."""

    def __init__(self, index: OfferedPrefixes, engine_id: str, tenant: str) -> None:
        self.of = engine_id, tenant
        """Engine id and tenant."""
        self.rows = 0
        """Number of rows of the index."""
        self._index, self._own = index, tenant_part(tenant)
        self._offers: OrderedDict[int, tuple[bytes, ...]] = OrderedDict()

    def began(self, number: int, digests: bytes) -> int:
        """Takes an offer with the digests of its unit 1 and of its whole steps, concatenated. An offer that had this
        number ends. Returns the number of rows of both.
        """
        ended = self.ended(number)
        most = min(len(digests), OFFER_DIGESTS_MAX * DIGEST_BYTES)
        # A lead that lies may tell one digest twice.
        told = tuple(dict.fromkeys(self._own + digests[at : at + DIGEST_BYTES] for at in range(0, most, DIGEST_BYTES)))
        self._offers[number] = told
        self.rows += 1 + len(told)
        self._index.put(self, told)
        self._index.make_room(self)
        return ended + 1 + len(told)

    def ended(self, number: int) -> int:
        """Takes the end of an offer. Returns its number of rows; 0: it is not known."""
        told = self._offers.pop(number, None)
        if told is None:
            return 0
        self.rows -= 1 + len(told)
        self._index.take_out(self, told)
        return 1 + len(told)

    def lose_oldest(self) -> None:
        """Forgets the offer that was told first."""
        self.ended(next(iter(self._offers)))

    def forget(self) -> Iterator[int]:
        """Forgets everything, because a snapshot follows or the engine is gone: an offer for each number that it
        yields, which is the number of its rows.
        """
        while rows := self.rows:
            self.lose_oldest()
            yield rows - self.rows
