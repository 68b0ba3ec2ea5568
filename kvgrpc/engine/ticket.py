"""What a scheduler hands to its workers."""

from dataclasses import dataclass, field

from kvgrpc.core.values.layout import PoolLayout


@dataclass(frozen=True)
class RankTicket:
    """Lets a worker attach its rank to its engine's lead. Secret; send it over the engine's own channels."""

    socket_path: str
    secret: bytes = field(repr=False)
    memory_bytes: int
    """What every rank's memory has; with several pipeline stages, what none has more of."""
    comes_back_s: float = 0.0
    """How long a worker whose lead died waits for the next one; 0: not at all."""
    address: str = ""
    """Where a worker on another host finds the lead, host:port; empty: the worker is on the lead's host."""
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


def ticket_of(socket_path: str, secret: bytes, pool: PoolLayout, world_size: int) -> RankTicket:
    """The ticket of an engine with that pool and so many ranks (0: one)."""
    if pool.stages <= 1:
        return RankTicket(socket_path, secret, pool.total_bytes)
    each = (world_size or 1) // pool.stages
    return RankTicket(socket_path, secret, pool.total_bytes, stage_bytes=pool.stage_bytes, stage_ranks=each)
