"""The prefixes that engines are believed to hold, by the digests of a content chain. The index is bounded and may be
wrong: an engine that lacks the prefix after all computes it.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

STEP_UNITS = 16
"""Number of units of a chain between two digests that the index keeps: 256 tokens. Leads tell the same digests."""
HOLDERS_MAX = 8
"""Maximum number of engines that are kept for one digest; the latest ones stay."""
PREFIXES_MAX = 65_536
"""Maximum number of digests that the index keeps."""
LOOKS_MAX = 256
"""Maximum number of digests of a prompt that are looked up, the longest prefixes first."""
TOLD_MAX = 65_536
"""Maximum number of digests that are kept of what one engine has told."""
DIGEST_BYTES = 32


class PrefixIndex:
    """An index of prefixes and of the engines that hold them. A chain is its digests h_1, h_2, ..., one a unit."""

    def __init__(self, most: int = PREFIXES_MAX) -> None:
        self._most = most
        self._holders: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, engine_id: str, chain: Sequence[bytes]) -> None:
        """Notes that an engine holds the KV of a chain."""
        self.hold(engine_id, [chain[units - 1] for units in _kept(len(chain))])

    def hold(self, engine_id: str, digests: Iterable[bytes]) -> None:
        """Notes that an engine holds the KV up to these digests, which are of unit 1 or of whole steps."""
        for digest in digests:
            others = tuple(one for one in self._holders.get(digest, ()) if one != engine_id)
            self._holders[digest] = (engine_id, *others)[:HOLDERS_MAX]
            self._holders.move_to_end(digest)
        while len(self._holders) > self._most:
            self._holders.popitem(last=False)

    def drop(self, engine_id: str, digests: Iterable[bytes]) -> None:
        """Notes that an engine no longer holds the KV up to these digests."""
        for digest in digests:
            others = tuple(one for one in self._holders.get(digest, ()) if one != engine_id)
            if others:
                self._holders[digest] = others
            else:
                self._holders.pop(digest, None)

    def units_held(self, chain: Sequence[bytes]) -> dict[str, int]:
        """Returns how many first units of a chain each engine holds."""
        found: dict[str, int] = {}
        for units in list(_kept(len(chain)))[::-1][:LOOKS_MAX]:
            for engine_id in self._holders.get(chain[units - 1], ()):
                found.setdefault(engine_id, units)
        return found


class ToldOffers:
    """Rows of an index that stand for what the lead of one engine has told of its offers (WatchOffers). Of an engine
    that tells too much a part is believed.
    """

    def __init__(self, engine_id: str, index: PrefixIndex) -> None:
        self._engine_id, self._index = engine_id, index
        self._offers: dict[int, tuple[bytes, ...]] = {}
        self._counts: Counter[bytes] = Counter()
        """Number of offers that have each digest."""

    def forget(self) -> None:
        """Forgets everything, because a snapshot follows or the engine is gone."""
        self._index.drop(self._engine_id, self._counts)
        self._offers.clear()
        self._counts.clear()

    def began(self, number: int, digests: bytes) -> None:
        """Takes an offer with the digests of its unit 1 and of its whole steps, concatenated."""
        self.ended(number)
        told = tuple(digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES))
        if len(self._offers) >= TOLD_MAX or self._counts.total() + len(told) > TOLD_MAX:
            return
        self._offers[number] = told
        self._counts.update(told)
        self._index.hold(self._engine_id, told)

    def ended(self, number: int) -> None:
        """Takes the end of an offer, known or not."""
        told = self._offers.pop(number, ())
        self._counts.subtract(told)
        gone = {digest for digest in told if not self._counts[digest]}
        for digest in gone:
            del self._counts[digest]
        self._index.drop(self._engine_id, gone)


def _kept(units: int) -> list[int]:
    """Returns the lengths of a chain whose digests the index keeps: whole steps, and the first unit of short ones."""
    return [1, *range(STEP_UNITS, units + 1, STEP_UNITS)] if units else []
