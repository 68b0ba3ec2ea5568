"""The ticket that a scheduler hands to its workers, and what a worker shows a lead on another host."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvgrpc.core.values.layout import PoolLayout


@dataclass(frozen=True)
class RankTicket:
    """The secret by which a worker attaches its rank to its engine's lead. Send it over the engine's own channels."""

    socket_path: str
    secret: bytes = field(repr=False)
    memory_bytes: int
    """Size of every rank's memory; with several pipeline stages, the largest size."""
    comes_back_s: float = 0.0
    """Time that a worker whose lead died waits for the next one, in seconds; 0: it does not wait."""
    address: str = ""
    """Address of the lead for a worker on another host, host:port; empty: the worker is on the lead's host."""
    stage_bytes: tuple[int, ...] = ()
    """Smallest memory of the ranks of each pipeline stage, if there are several stages."""
    stage_ranks: int = 0
    """Number of ranks of each stage, if there are several."""

    def fits(self, rank: int, nbytes: int) -> bool:
        """Returns whether a rank's memory may have `nbytes` bytes."""
        if not self.stage_bytes:
            return nbytes == self.memory_bytes
        stage = rank // self.stage_ranks
        return stage < len(self.stage_bytes) and self.stage_bytes[stage] <= nbytes <= self.memory_bytes


@dataclass(frozen=True)
class RankCredentials:
    """The proof by which a lead on another host knows a rank. The fields are those of a server's `[tls]`."""

    dir: str | Path = ""
    """Folder with `tls.crt`, `tls.key` and `ca.crt`, as Kubernetes and cert-manager name them."""
    cert: str | Path = ""
    """Path of the certificate chain, in place of the folder's."""
    key: str | Path = ""
    """Path of the key, in place of the folder's."""
    ca: str | Path = ""
    """Path of the CAs that sign leads, in place of the folder's."""
    workload_api: str = ""
    """Address of a SPIFFE Workload API, unix:///PATH, which gives all three in place of files."""
    token_file: str | Path = ""
    """Path of a file with a bearer token."""

    def paths(self) -> dict[str, str]:
        return {name: str(path) for name, path in asdict(self).items()}


def ticket_of(socket_path: str, secret: bytes, pool: PoolLayout, world_size: int) -> RankTicket:
    """Returns the ticket of an engine with that pool and `world_size` ranks (0: one)."""
    if pool.stages <= 1:
        return RankTicket(socket_path, secret, pool.total_bytes)
    each = (world_size or 1) // pool.stages
    return RankTicket(socket_path, secret, pool.total_bytes, stage_bytes=pool.stage_bytes, stage_ranks=each)
