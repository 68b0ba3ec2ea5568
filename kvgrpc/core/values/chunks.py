"""Blocks that one round of a move copies, and how much they are."""

from typing import NamedTuple

from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.call import LayerRange
from kvgrpc.core.values.records import dataclass


class Size(NamedTuple):
    """Size of a move for each rank of the destination, exact or as an upper bound."""

    nbytes: int
    blocks: int
    runs: int
    """Maximum number of runs: planning joins neighbouring runs."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """Source blocks of each group and the destination blocks that they fill, in `layers` (None: all)."""

    source: Blocks
    destination: Blocks
    layers: LayerRange | None
    begins: tuple[tuple[int, int], ...] = ()
    """Per group, the prompt tokens with which the source's and the destination's list begin. Blocks that only one list
    has are left out. Empty: both lists cover the same tokens.
    """
