"""What a move took, for the engine whose ranks moved the bytes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MoveTelemetry:
    """What this engine's ranks moved in one move, reduced over them."""

    nbytes: int
    descriptors: int
    wire_s: float
    """From the first byte to the last, of the pair of ranks that took longest."""
    post_s: float
    """How long the data path was busy with submitting, of the pair for which that was longest."""
