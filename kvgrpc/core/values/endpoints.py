"""Endpoints: what one rank tells another at the handshake so that bytes can move, one value per data path.

The service carries them between leads, `kvgrpc.datapath` makes and uses them, and the core hands them on.
"""

from collections.abc import Collection
from dataclasses import fields, replace
from enum import Enum
from typing import Self

from kvgrpc.core.values.records import dataclass


class MemoryKind(Enum):
    """The memory in which a segment lies."""

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
    """Token that a peer shows at the socket to get a descriptor, once under each rank number."""
    nbytes: int
    nonce: bytes
    nonce_offset: int
    """Offset of the nonce in the mapping, past the pool's own bytes. Reading it back proves the same host."""


@dataclass(frozen=True)
class ProcessEndpoint:
    """A socket at which a rank's process proves itself to a peer on this host. Only that process listens there."""

    socket_path: str
    token: bytes
    """Token that a peer shows at the socket to get a proof, once under each rank number."""


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
    """The process that writes when this agent's side writes; None if no peer can look at it."""


@dataclass(frozen=True)
class CollectiveEndpoint:
    """A rank that sends its memory over a process group, which is made when a peer asks for it."""

    backend: str
    """Library of the group: gloo or nccl."""
    nbytes: int
    framing: int
    """Number of the way in which sends are cut into messages. Both ranks must use the same."""


SPANS_MAX = 8_192
"""Maximum number of spans, and of allocations, that all endpoints of one message have."""


@dataclass(frozen=True)
class AllocationSpan:
    """Bytes of one of an endpoint's allocations."""

    allocation: int
    """Index of the allocation."""
    offset: int
    nbytes: int


@dataclass(frozen=True)
class CudaVmmEndpoint:
    """GPU memory in allocations whose descriptors are handed out over a unix socket."""

    socket_path: str = ""
    token: bytes = b""
    """Token that a peer shows at the socket to get the descriptors, once under each rank number."""
    device_uuid: bytes = b""
    nonce: bytes = b""
    """First bytes of one more allocation, the last one."""
    allocations: tuple[int, ...] = ()
    """Bytes of each allocation, without the nonce's."""
    spans: tuple[AllocationSpan, ...] = ()
    """Spans through which a rank's linear offsets run, in order."""
    why_not: str = ""
    """Why the memory has no descriptors. If it is set, all other fields are empty."""

    @property
    def nbytes(self) -> int:
        return sum(span.nbytes for span in self.spans)


@dataclass(frozen=True)
class WindowEndpoint:
    """Memory of a rank on this host that copies what it is asked for into a window of the peer."""

    nbytes: int
    framing: int
    """Version of how the two ranks cut what is sent."""


@dataclass(frozen=True)
class LoopbackEndpoint:
    """Memory in this process, found by key."""

    key: str
    nbytes: int


@dataclass(frozen=True)
class RankEndpoint:
    """The ways to reach one rank's memory. A data path that the rank does not offer is None."""

    rank: int
    shm: ShmEndpoint | None = None
    cma: CmaEndpoint | None = None
    cuda_vmm: CudaVmmEndpoint | None = None
    nixl: NixlEndpoint | None = None
    collective: CollectiveEndpoint | None = None
    loopback: LoopbackEndpoint | None = None
    window: WindowEndpoint | None = None

    @property
    def on_device(self) -> bool:
        """True if some of the memory is on a device. A rank re-packs nothing in device memory."""
        if self.cuda_vmm is not None:
            return True
        parts = [part.segments for part in (self.cma, self.nixl) if part is not None]
        return any(segment.kind is MemoryKind.CUDA for segments in parts for segment in segments)

    def without(self, data_paths: Collection[str]) -> Self:
        """Returns a copy without the parts of these data paths."""
        return self.only({field.name for field in fields(self)} - {"rank", *data_paths})

    def only(self, data_paths: Collection[str]) -> Self:
        """Returns a copy without the parts of all other data paths."""
        return replace(
            self,
            shm=self.shm if "shm" in data_paths else None,
            cma=self.cma if "cma" in data_paths else None,
            cuda_vmm=self.cuda_vmm if "cuda_vmm" in data_paths else None,
            nixl=self.nixl if "nixl" in data_paths else None,
            collective=self.collective if "collective" in data_paths else None,
            loopback=self.loopback if "loopback" in data_paths else None,
            window=self.window if "window" in data_paths else None,
        )
