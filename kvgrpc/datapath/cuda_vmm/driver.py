"""Interface between this data path and the driver of GPUs: the parts of CUDA's virtual memory management that it uses.

An allocation is memory of a device with a handle. A descriptor names it in another process; a mapping gives it
addresses in this one. The memory exists until its last handle, descriptor and mapping are gone, in any process.
"""

from dataclasses import dataclass
from typing import Protocol

from kvgrpc.datapath.base import DataPathFailed
from kvgrpc.datapath.host.addresses import Rows
from kvgrpc.datapath.mirror.device import Copy


class DriverError(DataPathFailed):
    """A call of the driver failed."""

    def __init__(self, call: str, result: str) -> None:
        """Makes the error of a call. `result` is the name of the CUresult."""
        self.call, self.result = call, result
        super().__init__(f"{call}: {result}")


@dataclass(frozen=True)
class Found:
    """The allocation behind an address of this process."""

    handle: int
    """Handle that was retained for the caller, who releases it."""
    address: int
    """Address at which the whole allocation is mapped."""
    nbytes: int
    exports: bool
    """True if the allocation can have descriptors."""
    whole: bool
    """True if that range is one allocation, as far as its ends show."""


class Driver(Protocol):
    """Calls of the driver, from any thread, for any device; the thread stays on its own. All raise DriverError.

    Devices are numbered as this process sees them, and sizes of allocations are multiples of `granularity`.
    """

    def uuids(self) -> tuple[bytes, ...]:
        """Returns 16 bytes for each device, the same in every process that sees the device."""

    def reaches(self, device: int, other: int) -> bool:
        """Returns True if a device can read the memory of another one (peer access)."""

    def granularity(self, device: int) -> int:
        """Returns the unit of allocation sizes, in bytes."""

    def create(self, device: int, nbytes: int) -> int:
        """Returns the handle of a new allocation, with undefined bytes, that can have descriptors."""

    def find(self, device: int, address: int) -> Found | None:
        """Returns the allocation mapped there, or None for memory without a handle, such as that of cudaMalloc."""

    def release(self, handle: int) -> None: ...

    def export(self, handle: int) -> int:
        """Returns a new descriptor, for the caller to close. A process may map it writable, and is trusted not to."""

    def import_(self, device: int, fd: int) -> int:
        """Returns the handle of the allocation that a descriptor names. The caller closes the descriptor."""

    def is_of(self, handle: int, device: int) -> bool:
        """Returns True if an allocation is memory of that device, which stays there."""

    def map(self, device: int, handle: int, nbytes: int, *, writable: bool) -> int:
        """Maps the first `nbytes` bytes of an allocation for `device`, and returns the address. A write through a
        mapping that is not writable is a fault of the writer.
        """

    def unmap(self, device: int, address: int, nbytes: int) -> None:
        """Unmaps all that `map` returned. No copy of it may be in flight."""

    def copy(self, device: int, rows: Rows) -> Copy:
        """Starts to copy these rows, in a queue of the device beside those that compute. Addresses of host memory are
        allowed, too. Raises CopyFailed if none was started; after any other error some may be in flight.
        """
