"""What a posting does with the bytes, seen from the rank that posts it."""

from enum import Enum


class Operation(Enum):
    """Where the runs of a posting lead."""

    READ = "read"
    """From the peer's memory into this rank's."""
    WRITE = "write"
    """From this rank's memory into the peer's."""
