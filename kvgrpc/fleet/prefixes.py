"""The prefixes that engines are believed to hold because they were picked for them, by the digests of a content chain.
The index is bounded and may be wrong: an engine that lacks the prefix after all computes it.
"""

from collections import OrderedDict
from collections.abc import Sequence

STEP_UNITS = 16
"""Number of units of a chain between two digests that the index keeps: 256 tokens. Leads tell the same digests."""
HOLDERS_MAX = 8
"""Maximum number of engines that are kept for one digest; the latest ones stay."""
PREFIXES_MAX = 65_536
"""Maximum number of digests that the index keeps."""
LOOKS_MAX = 256
"""Maximum number of digests of a prompt that are looked up, the longest prefixes first."""


class PrefixIndex:
    """An index of prefixes and of the engines that hold them. A chain is its digests h_1, h_2, ..., one a unit."""

    def __init__(self, most: int = PREFIXES_MAX) -> None:
        self._most = most
        self._holders: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, engine_id: str, chain: Sequence[bytes]) -> None:
        """Notes that an engine holds the KV of a chain."""
        for digest in [chain[units - 1] for units in kept_units(len(chain))]:
            others = tuple(one for one in self._holders.get(digest, ()) if one != engine_id)
            self._holders[digest] = (engine_id, *others)[:HOLDERS_MAX]
            self._holders.move_to_end(digest)
        while len(self._holders) > self._most:
            self._holders.popitem(last=False)

    def units_held(self, chain: Sequence[bytes]) -> dict[str, int]:
        """Returns how many first units of a chain each engine holds."""
        found: dict[str, int] = {}
        for units in kept_units(len(chain))[::-1][:LOOKS_MAX]:
            for engine_id in self._holders.get(chain[units - 1], ()):
                found.setdefault(engine_id, units)
        return found


def kept_units(units: int) -> list[int]:
    """Returns the lengths of a chain whose digests the index keeps: whole steps, and the first unit of short ones."""
    return [1, *range(STEP_UNITS, units + 1, STEP_UNITS)] if units else []
