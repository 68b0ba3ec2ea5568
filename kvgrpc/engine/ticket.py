"""What a scheduler hands to its workers."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RankTicket:
    """Lets a worker attach its rank to its engine's lead. Secret; send it over the engine's own channels."""

    socket_path: str
    secret: bytes = field(repr=False)
    memory_bytes: int
    """What every rank's memory has; with several pipeline stages, what none has more of."""
    stage_bytes: tuple[int, ...] = ()
    """With several stages: how much the memory of each one's ranks has at least."""
    stage_ranks: int = 0
    """Ranks of each of them."""

    def fits(self, rank: int, nbytes: int) -> bool:
        """Whether a rank's memory may have so many bytes."""
        if not self.stage_bytes:
            return nbytes == self.memory_bytes
        stage = rank // self.stage_ranks
        return stage < len(self.stage_bytes) and self.stage_bytes[stage] <= nbytes <= self.memory_bytes

    comes_back_s: float = 0.0
    """How long a worker whose lead died waits for the next one; 0: not at all."""
    address: str = ""
    """Where a worker on another host finds the lead, host:port; empty: the worker is on the lead's host."""
