"""What one rank tells another at the handshake, so that bytes can move: one value per data path.

Values only. The service carries them between leads, `kvgrpc.datapath` makes and uses them, the core hands them on.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum
from typing import Self


class MemoryKind(Enum):
    """Where a segment of a rank's memory lives."""

    HOST = "host"
    PINNED_HOST = "pinned_host"
    CUDA = "cuda"


@dataclass(frozen=True)
class Segment:
    """One allocation of a rank's memory. A rank's linear offsets run through its segments in order."""

    address: int
    """Virtual address in the owning process."""
    nbytes: int
    kind: MemoryKind = MemoryKind.HOST
    device: int = 0


@dataclass(frozen=True)
class ShmEndpoint:
    """A pool in a memfd on this host, handed out read-only over a unix socket."""

    socket_path: str
    token: bytes
    """Shown at the socket for a descriptor, once under each rank number."""
    nbytes: int
    nonce: bytes
    nonce_offset: int
    """Where the mapping holds the nonce (past the pool's own bytes): reading it back proves the same host."""


@dataclass(frozen=True)
class ProcessEndpoint:
    """Where a rank's process proves itself to a peer on this host: it is the one that listens there."""

    socket_path: str
    token: bytes
    """Shown at the socket for a proof, once under each rank number."""


@dataclass(frozen=True)
class CmaEndpoint:
    """Memory that another process of this user on this host may read with process_vm_readv."""

    process: ProcessEndpoint
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class NixlEndpoint:
    """A NIXL agent and its registered memory."""

    agent: str
    metadata: bytes
    backend: str
    segments: tuple[Segment, ...]
    process: ProcessEndpoint | None = None
    """The process that writes when this agent's side writes; None where no peer can look."""


@dataclass(frozen=True)
class CollectiveEndpoint:
    """A rank that sends its memory over a process group, which is made when a peer asks for it."""

    backend: str
    """Library of the group: gloo or nccl."""
    nbytes: int
    framing: int
    """How sends are cut into messages: both ranks do it alike."""


SPANS_MAX = 8_192
"""Spans, or allocations, that all endpoints of one message have."""


@dataclass(frozen=True)
class Span:
    """Bytes of one of the allocations that an endpoint has."""

    allocation: int
    """Which one."""
    offset: int
    nbytes: int


@dataclass(frozen=True)
class CudaVmmEndpoint:
    """Memory of a GPU in allocations of which descriptors are handed out over a unix socket."""

    socket_path: str = ""
    token: bytes = b""
    """Shown at the socket for the descriptors, once under each rank number."""
    device_uuid: bytes = b""
    nonce: bytes = b""
    """What one more allocation, the last one, begins with."""
    allocations: tuple[int, ...] = ()
    """Bytes of each, without that one."""
    spans: tuple[Span, ...] = ()
    """A rank's linear offsets run through them in order."""
    why_not: str = ""
    """Why there are no descriptors of that memory; then all else is empty."""

    @property
    def nbytes(self) -> int:
        return sum(span.nbytes for span in self.spans)


@dataclass(frozen=True)
class LoopbackEndpoint:
    """Memory in this very process, found by key."""

    key: str
    nbytes: int


@dataclass(frozen=True)
class RankEndpoint:
    """How to reach one rank's memory. A path that the rank does not offer is None."""

    rank: int
    shm: ShmEndpoint | None = None
    cma: CmaEndpoint | None = None
    cuda_vmm: CudaVmmEndpoint | None = None
    nixl: NixlEndpoint | None = None
    collective: CollectiveEndpoint | None = None
    loopback: LoopbackEndpoint | None = None

    @property
    def on_device(self) -> bool:
        """Whether some of the memory is a device's, in which a rank re-packs nothing."""
        if self.cuda_vmm is not None:
            return True
        parts = [part.segments for part in (self.cma, self.nixl) if part is not None]
        return any(segment.kind is MemoryKind.CUDA for segments in parts for segment in segments)

    def only(self, data_paths: Collection[str]) -> Self:
        """The same without the parts of all other data paths."""
        return replace(
            self,
            shm=self.shm if "shm" in data_paths else None,
            cma=self.cma if "cma" in data_paths else None,
            cuda_vmm=self.cuda_vmm if "cuda_vmm" in data_paths else None,
            nixl=self.nixl if "nixl" in data_paths else None,
            collective=self.collective if "collective" in data_paths else None,
            loopback=self.loopback if "loopback" in data_paths else None,
        )
