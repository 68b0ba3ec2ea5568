"""What a scheduler hands to its workers."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RankTicket:
    """Lets a worker attach its rank to its engine's lead. Secret; send it over the engine's own channels."""

    socket_path: str
    secret: bytes = field(repr=False)
    memory_bytes: int
    """What every rank's memory has."""
    comes_back_s: float = 0.0
    """How long a worker whose lead died waits for the next one; 0: not at all."""
    address: str = ""
    """Where a worker on another host finds the lead, host:port; empty: the worker is on the lead's host."""
