"""GPU memory in one allocation that can be exported to peers as descriptors."""

from kvgrpc.core.values.endpoints import MemoryKind, Segment
from kvgrpc.datapath.cuda_vmm.driver import Driver
from kvgrpc.datapath.host.memory import PrivateMemory


class VmmAllocation:
    """`nbytes` bytes of a device, rounded up to its granularity, mapped writable here. Raises DriverError."""

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
        """Unmaps the allocation; no copy may be in flight. Memory that the driver does not take is lost. Idempotent."""
        if not self._freed:
            self._freed = True
            try:
                self._driver.unmap(self._device, self.address, self._whole)
            finally:
                self._driver.release(self._handle)


class VmmMemory(PrivateMemory):
    """`nbytes` bytes of a device, mapped writable here, with undefined content. Raises DriverError.

    After `free` the addresses are invalid, and the memory returns to the device once no peer has it mapped.
    """

    def __init__(self, driver: Driver, device: int, nbytes: int) -> None:
        self.driver = driver
        self.allocation = VmmAllocation(driver, device, nbytes)
        super().__init__([Segment(self.allocation.address, nbytes, MemoryKind.CUDA, device)])

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """Interface by which torch makes a tensor of its bytes, without a copy; the tensor keeps this object."""
        segment = self.segments[0]
        return {"shape": (segment.nbytes,), "typestr": "|u1", "data": (segment.address, False), "version": 3}

    def free(self) -> None:
        """Unmaps the memory; no copy may be in flight. Idempotent."""
        self.allocation.free()


KEPT: list[object] = []
"""Objects that a lost copy may still use. Mappings that nobody knows any more stay by themselves."""
