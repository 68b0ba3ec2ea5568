"""The seam between this data path and the driver of GPUs: what it takes of CUDA's virtual memory management.

An allocation is memory of a device by a handle. A descriptor names it in another process; a mapping gives it addresses
in this one. Its memory is there until its last handle, descriptor and mapping are gone, in whatever process.
"""

from dataclasses import dataclass
from typing import Protocol

from kvgrpc.datapath.base import DataPathFailed
from kvgrpc.datapath.host.addresses import Rows
from kvgrpc.datapath.mirror.device import Copy


class DriverError(DataPathFailed):
    """A call of the driver failed."""

    def __init__(self, call: str, result: str) -> None:
        """`result`: the name of the CUresult."""
        self.call, self.result = call, result
        super().__init__(f"{call}: {result}")


@dataclass(frozen=True)
class Found:
    """The allocation behind an address of this process."""

    handle: int
    """Retained for the caller, who releases it."""
    address: int
    """Where all of it is mapped."""
    nbytes: int
    exports: bool
    """Whether it was made so that descriptors of it can be."""
    whole: bool
    """Whether that range is one allocation, as far as its ends show."""


class Driver(Protocol):
    """Any thread may call it, on any device, and stays on the device that it was on. All raise DriverError.

    Devices are numbered as this process sees them, and sizes of allocations are multiples of `granularity`.
    """

    def uuids(self) -> tuple[bytes, ...]:
        """Of the devices, 16 bytes each: the same in every process that sees the device."""
        ...

    def reaches(self, device: int, other: int) -> bool:
        """Whether a device can read the memory of another one (peer access)."""
        ...

    def granularity(self, device: int) -> int:
        """Bytes."""
        ...

    def create(self, device: int, nbytes: int) -> int:
        """The handle of a new allocation of which there can be descriptors. Its bytes may be anything."""
        ...

    def find(self, device: int, address: int) -> Found | None:
        """The allocation that is mapped there; None for memory that has no handle, as that of cudaMalloc."""
        ...

    def release(self, handle: int) -> None: ...

    def export(self, handle: int) -> int:
        """A new descriptor, for the caller to close. Writable for whoever maps it so: readers are trusted with that."""
        ...

    def import_(self, device: int, fd: int) -> int:
        """The handle of the allocation that a descriptor names; the caller closes the descriptor."""
        ...

    def is_of(self, handle: int, device: int) -> bool:
        """Whether an allocation is memory of that device, which stays there."""
        ...

    def map(self, device: int, handle: int, nbytes: int, *, writable: bool) -> int:
        """The address at which `device` sees the first `nbytes` bytes of an allocation from now on. A write through a
        mapping that is not writable is a fault of who writes.
        """
        ...

    def unmap(self, device: int, address: int, nbytes: int) -> None:
        """All of what `map` gave. No copy of it is under way."""
        ...

    def copy(self, device: int, rows: Rows) -> Copy:
        """Starts copying these rows, in a queue of the device's own beside those that compute. Addresses of host memory
        are allowed, too. Raises CopyFailed where none was started; after any other error some may be under way.
        """
        ...
