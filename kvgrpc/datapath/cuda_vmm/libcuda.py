"""The driver's own library, libcuda.so.1, by ctypes: exactly the calls that this data path needs, typed.

A package's binding would have to fit the CUDA of the engine's torch. This interface of the driver is the same for all
versions since CUDA 11.4, the first one with cuDeviceGetUuid_v2. Calls release the interpreter lock. The code follows
the driver's header; docs/decisions/0037-gpu-memory-by-descriptors.md lists what no GPU has shown.
"""

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from typing import Any

from kvgrpc.datapath.base import DataPathUnavailable
from kvgrpc.datapath.cuda_vmm.driver import DriverError, Found
from kvgrpc.datapath.host.addresses import Rows
from kvgrpc.datapath.mirror.device import CopyFailed

LIBRARY = "libcuda.so.1"
UUID_BYTES = 16
# <cuda.h>
_PINNED, _ON_DEVICE, _FILE_DESCRIPTOR = 1, 1, 1
_READ, _READ_WRITE = 1, 3
_RDMA_WITH_VMM = 110  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
_NON_BLOCKING = 1  # this stream and the default one do not wait for each other
_SLEEPING_WAIT, _NO_TIMING = 1, 2
_MINIMUM = 0


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class Properties(ctypes.Structure):
    """CUmemAllocationProp of <cuda.h>."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("windows_only", c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class AccessOf(ctypes.Structure):
    """CUmemAccessDesc of <cuda.h>."""

    _fields_ = (("location", _Location), ("flags", c_int))


_POINTER_SIZED = c_ulonglong  # CUdeviceptr and CUmemGenericAllocationHandle, both 64 bits wide
_OUT = POINTER(_POINTER_SIZED)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetUuid_v2": (c_void_p, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(Properties), c_int),
    "cuMemCreate": (_OUT, c_size_t, POINTER(Properties), c_ulonglong),
    "cuMemRelease": (_POINTER_SIZED,),
    "cuMemRetainAllocationHandle": (_OUT, c_void_p),
    "cuMemGetAllocationPropertiesFromHandle": (POINTER(Properties), _POINTER_SIZED),
    "cuMemGetAddressRange_v2": (_OUT, POINTER(c_size_t), _POINTER_SIZED),
    "cuMemExportToShareableHandle": (c_void_p, _POINTER_SIZED, c_int, c_ulonglong),
    "cuMemImportFromShareableHandle": (_OUT, c_void_p, c_int),
    "cuMemAddressReserve": (_OUT, c_size_t, c_size_t, _POINTER_SIZED, c_ulonglong),
    "cuMemAddressFree": (_POINTER_SIZED, c_size_t),
    "cuMemMap": (_POINTER_SIZED, c_size_t, c_size_t, _POINTER_SIZED, c_ulonglong),
    "cuMemUnmap": (_POINTER_SIZED, c_size_t),
    "cuMemSetAccess": (_POINTER_SIZED, c_size_t, POINTER(AccessOf), c_size_t),
    "cuMemcpyAsync": (_POINTER_SIZED, _POINTER_SIZED, c_size_t, c_void_p),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
}


class CudaDriver:
    """A `Driver`. Raises DataPathUnavailable if there is no library with these calls, and DriverError if it does not
    start, for example without a device.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            loaded = ctypes.CDLL(library)
            self._calls = {name: getattr(loaded, name) for name in _SIGNATURES}
        except (OSError, AttributeError) as error:
            raise DataPathUnavailable(f"the driver of GPUs cannot be used: {error}") from error
        for name, arguments in _SIGNATURES.items():
            self._calls[name].argtypes = arguments
            self._calls[name].restype = c_int
        self._call("cuInit", 0)
        # Guards what is made once per device. Reentrant, since Python may free GPU memory in a thread that holds it.
        self._lock = threading.RLock()
        self._contexts: dict[int, c_void_p] = {}
        self._streams: dict[int, c_void_p] = {}

    def uuids(self) -> tuple[bytes, ...]:
        count = c_int()
        self._call("cuDeviceGetCount", byref(count))
        return tuple(map(self._uuid, range(count.value)))

    def reaches(self, device: int, other: int) -> bool:
        answer = c_int()
        self._call("cuDeviceCanAccessPeer", byref(answer), self._named(device), self._named(other))
        return bool(answer.value)

    def granularity(self, device: int) -> int:
        answer = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(answer), byref(self._properties(device)), _MINIMUM)
        return answer.value

    def create(self, device: int, nbytes: int) -> int:
        handle = _POINTER_SIZED()
        with self._on(device):
            self._call("cuMemCreate", byref(handle), nbytes, byref(self._properties(device)), 0)
        return handle.value

    def find(self, device: int, address: int) -> Found | None:
        with self._on(device):
            handle = self._retained(address)
            if handle is None:
                return None
            with contextlib.ExitStack() as undo:
                undo.callback(self.release, handle)
                base, nbytes = _POINTER_SIZED(), c_size_t()
                self._call("cuMemGetAddressRange_v2", byref(base), byref(nbytes), address)
                properties = self._properties_of(handle)
                # The documentation gives the range for cuMemAlloc only, so both ends must be of that allocation.
                ends = [self._retained(base.value), self._retained(base.value + nbytes.value - 1)]
                with contextlib.ExitStack() as rest:
                    for end in filter(None, ends):
                        rest.callback(self.release, end)
                undo.pop_all()
        exports = bool(properties.handle_types & _FILE_DESCRIPTOR) and properties.location.type == _ON_DEVICE
        return Found(handle, base.value, nbytes.value, exports=exports, whole=ends == [handle, handle])

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def export(self, handle: int) -> int:
        fd = c_int(-1)
        self._call("cuMemExportToShareableHandle", byref(fd), handle, _FILE_DESCRIPTOR, 0)
        return fd.value

    def import_(self, device: int, fd: int) -> int:
        handle = _POINTER_SIZED()
        with self._on(device):
            self._call("cuMemImportFromShareableHandle", byref(handle), fd, _FILE_DESCRIPTOR)
        return handle.value

    def is_of(self, handle: int, device: int) -> bool:
        found = self._properties_of(handle)
        home = found.location.type, found.location.id
        return found.type == _PINNED and home == (_ON_DEVICE, self._named(device))

    def map(self, device: int, handle: int, nbytes: int, *, writable: bool) -> int:
        access = AccessOf(_Location(_ON_DEVICE, self._named(device)), _READ_WRITE if writable else _READ)
        address = _POINTER_SIZED()
        with self._on(device), contextlib.ExitStack() as undo:
            self._call("cuMemAddressReserve", byref(address), nbytes, 0, 0, 0)
            undo.callback(self._call, "cuMemAddressFree", address.value, nbytes)
            self._call("cuMemMap", address.value, nbytes, 0, handle, 0)
            undo.callback(self._call, "cuMemUnmap", address.value, nbytes)
            self._call("cuMemSetAccess", address.value, nbytes, byref(access), 1)
            undo.pop_all()
        return address.value

    def unmap(self, device: int, address: int, nbytes: int) -> None:
        with self._on(device):
            self._call("cuMemUnmap", address, nbytes)
            self._call("cuMemAddressFree", address, nbytes)

    def copy(self, device: int, rows: Rows) -> "_Copies":
        queued = False
        try:
            with self._on(device), contextlib.ExitStack() as undo:
                stream, event = self._stream(device), c_void_p()
                self._call("cuEventCreate", byref(event), _SLEEPING_WAIT | _NO_TIMING)
                undo.callback(self.forget, device, event)
                for destination, source, nbytes in rows.tolist():
                    self._call("cuMemcpyAsync", destination, source, nbytes, stream)
                    queued = True
                self._call("cuEventRecord", event, stream)
                undo.pop_all()
        except DriverError as error:
            if queued:
                raise
            raise CopyFailed(error.message) from error
        return _Copies(self, device, event)

    def wait(self, device: int, event: c_void_p) -> None:
        with self._on(device):
            self._call("cuEventSynchronize", event)

    def forget(self, device: int, event: c_void_p) -> None:
        """Destroys an event for which nobody waits any more."""
        with self._on(device):
            self._call("cuEventDestroy_v2", event)

    def _call(self, name: str, *arguments: Any) -> None:
        if result := self._calls[name](*arguments):
            raise DriverError(name, self._name_of(result))

    def _name_of(self, result: int) -> str:
        text = c_char_p()
        unknown = self._calls["cuGetErrorName"](result, byref(text)) or text.value is None
        return f"CUresult {result}" if unknown else (text.value or b"").decode(errors="replace")

    def _retained(self, address: int) -> int | None:
        handle = _POINTER_SIZED()
        if self._calls["cuMemRetainAllocationHandle"](byref(handle), address):
            return None  # not mapped from a handle
        return handle.value

    def _named(self, device: int) -> int:
        """Returns the driver's own name of a device."""
        named = c_int()
        self._call("cuDeviceGet", byref(named), device)
        return named.value

    def _uuid(self, device: int) -> bytes:
        made = (ctypes.c_ubyte * UUID_BYTES)()
        self._call("cuDeviceGetUuid_v2", byref(made), self._named(device))
        return bytes(made)

    def _properties_of(self, handle: int) -> Properties:
        found = Properties()
        self._call("cuMemGetAllocationPropertiesFromHandle", byref(found), handle)
        return found

    def _properties(self, device: int) -> Properties:
        capable = c_int()
        named = self._named(device)
        self._call("cuDeviceGetAttribute", byref(capable), _RDMA_WITH_VMM, named)
        made = Properties(_PINNED, _FILE_DESCRIPTOR, _Location(_ON_DEVICE, named))
        made.rdma_capable = 1 if capable.value else 0  # NIXL may register it, too
        return made

    @contextlib.contextmanager
    def _on(self, device: int) -> Iterator[None]:
        """Directs the calling thread's calls to that device: to its primary context, which torch uses as well."""
        with self._lock:
            if device not in self._contexts:
                made = c_void_p()
                self._call("cuDevicePrimaryCtxRetain", byref(made), self._named(device))
                self._contexts[device] = made
            context = self._contexts[device]
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def _stream(self, device: int) -> c_void_p:
        with self._lock:
            if device not in self._streams:
                made = c_void_p()
                self._call("cuStreamCreate", byref(made), _NON_BLOCKING)
                self._streams[device] = made
            return self._streams[device]


class _Copies:
    """A `Copy` of everything that is queued before an event of its own."""

    def __init__(self, driver: CudaDriver, device: int, event: c_void_p) -> None:
        self._driver, self._device, self._event = driver, device, event

    def synchronize(self) -> None:
        try:
            self._driver.wait(self._device, self._event)
        finally:
            self._driver.forget(self._device, self._event)


@functools.cache
def load() -> CudaDriver:
    """Returns the driver of this process. Raises as CudaDriver does."""
    return CudaDriver()
