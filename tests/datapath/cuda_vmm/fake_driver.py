"""A driver of fake GPUs: an allocation is a memfd, and a mapping is one of the kernel's.

Descriptors are real and pass real sockets, the processor cannot write a read-only mapping, and memory lives as long as
the kernel says. Copies run when they are started, or in a thread as late as a test wants.
"""

import ctypes
import fcntl
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvgrpc.core.values.endpoints import MemoryKind, Segment
from kvgrpc.datapath.cuda_vmm.driver import DriverError, Found
from kvgrpc.datapath.cuda_vmm.memory import VmmMemory
from kvgrpc.datapath.host import libc
from kvgrpc.datapath.host.addresses import Rows
from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.datapath.mirror.device import CopyFailed

Bytes = NDArray[np.uint8]
UNIT = 1 << 16
GPU, OTHER_GPU = b"\x01" * 16, b"\x02" * 16
INVALID = "CUDA_ERROR_INVALID_VALUE"
WAIT_S = 20.0
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FIXED = 0x10  # <bits/mman.h>
_NOT_MAPPED = ctypes.c_void_p(-1).value


@dataclass(eq=False)
class FakeCopies:
    rows: Rows
    over: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def run(self) -> None:
        for destination, source, nbytes in self.rows.tolist():
            libc.memmove(destination, source, nbytes)
        self.over.set()

    def synchronize(self) -> None:
        if self.error is not None:
            raise self.error
        assert self.over.wait(WAIT_S), "the test never let it go on"


class FakeDriver:
    """A driver that sees the GPUs with the UUIDs `gpus`. Calls in `failing` fail with the text there; those in
    `failing_next` fail once.
    """

    def __init__(self, gpus: Sequence[bytes] = (GPU, OTHER_GPU), *, reaches: bool = True) -> None:
        self._gpus = tuple(gpus)
        self._reaches = reaches
        self.failing: dict[str, str] = {}
        self.failing_next: dict[str, str] = {}
        self.exports = True
        self.whole = True
        """`find` reports its range as one whole allocation."""
        self.unit = UNIT
        self.held: list[FakeCopies] | None = None
        """Copies that were started, if a test ends them."""
        self._lock = threading.RLock()  # memory may be freed wherever Python frees objects
        self._next = 1
        self._fds: dict[int, int] = {}
        self._references: dict[int, int] = {}
        self._mapped: dict[int, tuple[int, int]] = {}
        """Mappings by address -> (handle, bytes)."""

    # -- a Driver

    def uuids(self) -> tuple[bytes, ...]:
        return self._gpus

    def reaches(self, device: int, other: int) -> bool:
        assert device != other
        return self._reaches

    def granularity(self, device: int) -> int:
        self._check("cuMemGetAllocationGranularity")
        return self.unit

    def create(self, device: int, nbytes: int) -> int:
        self._check("cuMemCreate", bad=bool(nbytes % self.unit))
        fd = os.memfd_create(f"device-{self._gpus[device].hex()}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return self._new(fd)

    def find(self, device: int, address: int) -> Found | None:
        self._check("cuMemGetAddressRange_v2")
        with self._lock:
            for begin, (handle, nbytes) in self._mapped.items():
                if begin <= address < begin + nbytes:
                    self._references[handle] = self._references.get(handle, 0) + 1
                    return Found(handle, begin, nbytes, exports=self.exports, whole=self.whole)
        return None

    def release(self, handle: int) -> None:
        self._check("cuMemRelease")
        with self._lock:
            self._references[handle] -= 1
            if not self._references[handle]:
                del self._references[handle]
                os.close(self._fds.pop(handle))

    def export(self, handle: int) -> int:
        self._check("cuMemExportToShareableHandle")
        return os.dup(self._fds[handle])

    def import_(self, device: int, fd: int) -> int:
        try:
            sealed = bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
        except OSError:
            sealed = False
        self._check("cuMemImportFromShareableHandle", bad=not sealed)
        return self._new(os.dup(fd))

    def is_of(self, handle: int, device: int) -> bool:
        self._check("cuMemGetAllocationPropertiesFromHandle")
        named = str(Path(f"/proc/self/fd/{self._fds[handle]}").readlink())
        return named.startswith(f"/memfd:device-{self._gpus[device].hex()} ")

    def map(self, device: int, handle: int, nbytes: int, *, writable: bool) -> int:
        fd = self._fds[handle]
        self._check("cuMemMap", bad=bool(nbytes % self.unit) or nbytes > os.fstat(fd).st_size)
        self._check("cuMemSetAccess")
        allowed = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _LIBC.mmap(None, nbytes, allowed, mmap.MAP_SHARED, fd, 0)
        assert address not in (None, _NOT_MAPPED), os.strerror(ctypes.get_errno())
        with self._lock:
            self._mapped[address] = handle, nbytes
        return int(address)

    def unmap(self, device: int, address: int, nbytes: int) -> None:
        self._check("cuMemUnmap")
        with self._lock:
            assert self._mapped.pop(address)[1] == nbytes
        assert _LIBC.munmap(address, nbytes) == 0

    def copy(self, device: int, rows: Rows) -> FakeCopies:
        try:
            self._check("cuStreamCreate")
        except DriverError as error:
            raise CopyFailed(error.message) from error
        self._check("cuMemcpyAsync")
        copies = FakeCopies(rows)
        try:
            self._check("cuEventSynchronize")
        except DriverError as error:
            copies.error = error
        if self.held is not None:
            self.held.append(copies)
        else:
            copies.run()
        return copies

    # -- what a test asks

    @property
    def left(self) -> tuple[int, int]:
        """Returns the number of handles and of mappings that exist."""
        return len(self._fds), len(self._mapped)

    def references(self, handle: int) -> int:
        return self._references.get(handle, 0)

    def adjoining(self, count: int) -> int:
        """Maps `count` allocations of one unit each side by side, as growing segments do, and returns the address."""
        whole = _LIBC.mmap(None, count * self.unit, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        for i in range(count):
            address, handle = whole + i * self.unit, self.create(0, self.unit)
            allowed, fixed = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
            assert _LIBC.mmap(address, self.unit, allowed, fixed, self._fds[handle], 0) == address
            self._mapped[address] = handle, self.unit
        return int(whole)

    def _new(self, fd: int) -> int:
        with self._lock:
            handle, self._next = self._next, self._next + 1
            self._fds[handle], self._references[handle] = fd, 1
            return handle

    def _check(self, call: str, *, bad: bool = False) -> None:
        result = self.failing.get(call) or self.failing_next.pop(call, INVALID if bad else "")
        if result:
            raise DriverError(call, result)


DRIVER = FakeDriver()
"""The driver of this process."""


def view(address: int, nbytes: int) -> Bytes:
    """Returns memory as an array; it dies with its mapping."""
    return np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(address))


class ExportedMemory(PrivateMemory):
    """Allocations of a fake device, one for each size."""

    def __init__(self, sizes: Sequence[int], driver: FakeDriver = DRIVER, device: int = 0) -> None:
        self.driver = driver
        self._parts = [VmmMemory(driver, device, size) for size in sizes]
        super().__init__(segment for part in self._parts for segment in part.segments)

    def close(self) -> None:
        super().close()
        for part in self._parts:
            part.free()

    def views(self) -> list[Bytes]:
        return [view(segment.address, segment.nbytes) for segment in self.segments]


def exported(sizes: tuple[int, ...]) -> tuple[ExportedMemory, list[Bytes]]:
    """Makes GPU memory that has descriptors, and views of it."""
    memory = ExportedMemory(sizes)
    return memory, memory.views()


def plain(sizes: tuple[int, ...]) -> tuple[PrivateMemory, list[Bytes]]:
    """Makes GPU memory without a handle, as cudaMalloc does, and views of it."""
    arrays = [np.zeros(size, dtype=np.uint8) for size in sizes]
    segments = [Segment(array.ctypes.data, array.nbytes, MemoryKind.CUDA, 0) for array in arrays]
    return PrivateMemory(segments, owners=arrays), arrays
