"""Memory of a GPU in one allocation that peers can be given descriptors of."""

from kvgrpc.core.values.endpoints import MemoryKind, Segment
from kvgrpc.datapath.cuda_vmm.driver import Driver
from kvgrpc.datapath.host.memory import PrivateMemory


class Allocation:
    """`nbytes` bytes of a device, rounded up to what it allocates, mapped writable here. Raises DriverError."""

    def __init__(self, driver: Driver, device: int, nbytes: int) -> None:
        self._driver = driver
        self._device = device
        unit = driver.granularity(device)
        self._whole = -(-nbytes // unit) * unit
        self._handle = driver.create(device, self._whole)
        try:
            self.address = driver.map(device, self._handle, self._whole, writable=True)
        except BaseException:
            driver.release(self._handle)
            raise
        self._freed = False

    def free(self) -> None:
        """Unmaps it; no copy of it is under way. What the driver does not take back is lost. Idempotent."""
        if not self._freed:
            self._freed = True
            try:
                self._driver.unmap(self._device, self.address, self._whole)
            finally:
                self._driver.release(self._handle)


class VmmMemory(PrivateMemory):
    """`nbytes` bytes of a device, mapped writable here; what they are is not said. Raises DriverError.

    After `free` the addresses mean nothing, and the memory is the device's again once no peer has it mapped.
    """

    def __init__(self, driver: Driver, device: int, nbytes: int) -> None:
        self.driver = driver
        self.allocation = Allocation(driver, device, nbytes)
        super().__init__([Segment(self.allocation.address, nbytes, MemoryKind.CUDA, device)])

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """So that torch makes a tensor of bytes of it, without a copy; the tensor keeps this object."""
        segment = self.segments[0]
        return {"shape": (segment.nbytes,), "typestr": "|u1", "data": (segment.address, False), "version": 3}

    def free(self) -> None:
        """Unmaps it; no copy of it is under way. Idempotent."""
        self.allocation.free()


KEPT: list[object] = []
"""What a copy that was lost may still use. Mappings of which nobody knows any more stay by themselves."""
