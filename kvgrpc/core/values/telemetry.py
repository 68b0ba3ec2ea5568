"""Cost of a move, for the engine whose ranks moved the bytes."""

from kvgrpc.core.values.records import dataclass


@dataclass(frozen=True)
class MoveTelemetry:
    """Sums and maxima over this engine's ranks for one move."""

    nbytes: int
    descriptors: int
    wire_s: float
    """Time from the first byte to the last, in seconds, of the pair of ranks that took longest."""
    post_s: float
    """Time that the data path was busy submitting, in seconds, of the pair for which it was longest."""
