"""What a round of a move takes from where to where, in blocks."""

from dataclasses import dataclass
from typing import NamedTuple

from kvgrpc.core.values.calls import LayerRange
from kvgrpc.core.values.descriptors import Blocks


class Size(NamedTuple):
    """How much something is, or may be at most, for each rank of the destination."""

    nbytes: int
    blocks: int
    runs: int
    """At most so many: neighbours are joined when they are planned."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """Blocks of each group of the source, and those of the destination that they fill, in `layers` (None: all)."""

    source: Blocks
    destination: Blocks
    layers: LayerRange | None
    begins: tuple[tuple[int, int], ...] = ()
    """Of each group, the tokens of the prompt with which the first block of both lists begins; what only one of them
    has is left out. Empty: both lists are of the same tokens.
    """
