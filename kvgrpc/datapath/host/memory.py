"""A rank's own memory for the data paths: segments with addresses, and a secret to prove reach.

`SharedMemory` is a pool that peers on this host may map (path shm). `PrivateMemory` wraps allocations of an engine
(tensors, arrays). Both carry a nonce: 32 random bytes at a known place of this process's memory, which a peer reads
back by the very mechanism that it is going to use.

Only holders of `fd` can write into a `SharedMemory`, and `fd` goes to the pool's own engine only. A peer gets its own
descriptor, opened read-only, which allows no writable mapping. The file's mode (0400) keeps the peer's user, unless it
is root, from opening it for writing by mistake; the same user could change the mode back. `forbid_new_writers`, called
once every writer has its mapping, stops everyone. Nothing here stops one user's processes from debugging each other.
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import secrets
import struct
from collections.abc import Iterable
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvgrpc.core.values.endpoints import MemoryKind, Segment
from kvgrpc.datapath.host import libc
from kvgrpc.datapath.host.host_memory import available
from kvgrpc.errors import Exhausted, InternalError, InvalidRequest, PreconditionFailed, Reason

_log = logging.getLogger(__name__)

NONCE_BYTES = 32

# <linux/fcntl.h>, since Linux 5.1: the seal allows no new writable mapping and no write; old mappings stay.
_F_SEAL_FUTURE_WRITE = 0x10
# Start of the page behind the pool: the nonce, then the pool's bytes, for `attach`.
_LAST_PAGE = struct.Struct(f"={NONCE_BYTES}sQ")
_NO_MEMORY = {errno.ENOMEM, errno.ENOSPC, errno.EFAULT, errno.EFBIG, errno.EMFILE, errno.ENFILE}


class SharedMemory:
    """A pool in an anonymous file (memfd), allocated in full and sealed against changing its size.

    The file has no name, so that a killed process leaves nothing behind. A reader of the mapping cannot die by a bus
    error.
    """

    def __init__(self, fd: int, mapping: mmap.mmap, nbytes: int) -> None:
        self._fd = fd
        self._bytes: NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)
        self._mapping = mapping
        self.nbytes = nbytes
        self.nonce_offset = len(mapping) - mmap.PAGESIZE
        last_page = self._bytes[self.nonce_offset :]
        self.nonce = last_page[:NONCE_BYTES].tobytes()
        self._address = self._bytes.ctypes.data

    @classmethod
    def create(cls, nbytes: int, name: str = "kvgrpc-pool") -> Self:
        """Makes a new pool of zeros, mapped writable here. `name` is what /proc shows for it.

        Raises InvalidRequest for a size of zero or less, and Exhausted (POOL_EXHAUSTED) if it does not fit. That is
        checked before a byte is taken, since the kernel's own answer is a kill.
        """
        if nbytes <= 0:
            raise InvalidRequest(Reason.INVALID_FIELD, f"a pool of {nbytes} bytes holds nothing")
        size = _whole_pages(nbytes) + mmap.PAGESIZE
        limit = available()
        if limit is not None and size > limit.nbytes:
            raise Exhausted(
                Reason.POOL_EXHAUSTED,
                f"a pool of {nbytes} bytes does not fit: {limit.nbytes} bytes are left ({limit.limited_by})",
            )
        fd = -1
        try:
            fd = libc.memfd(name)
            mapping = _allocate(fd, size)
            last_page = _LAST_PAGE.pack(secrets.token_bytes(NONCE_BYTES), nbytes)
            mapping[-mmap.PAGESIZE : _LAST_PAGE.size - mmap.PAGESIZE] = last_page
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            os.fchmod(fd, 0o400)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            if error.errno in _NO_MEMORY:
                left = "an unknown number of" if limit is None else str(limit.nbytes)
                raise Exhausted(
                    Reason.POOL_EXHAUSTED,
                    f"a pool of {nbytes} bytes did not fit, though {left} bytes seemed left: {error.strerror}",
                ) from error
            raise InternalError(Reason.INTERNAL, f"cannot make a pool: {error}") from error
        return cls(fd, mapping, nbytes)

    @classmethod
    def attach(cls, fd: int) -> Self:
        """Maps a pool writable in the process of its own engine; keeps a copy of `fd`.

        Raises PreconditionFailed (POOL_KIND_MISMATCH) if `fd` is no such pool, or if the pool takes no further writers.
        """
        try:
            size = os.fstat(fd).st_size
            check_sealed(fd)
            if size < mmap.PAGESIZE:
                raise ValueError(f"it has {size} bytes")
            mapping = mmap.mmap(fd, size)
        except (OSError, ValueError) as error:
            raise PreconditionFailed(
                Reason.POOL_KIND_MISMATCH, f"the descriptor is not a pool to write into: {error}"
            ) from error
        last_page = mapping[-mmap.PAGESIZE :]
        nbytes: int = _LAST_PAGE.unpack_from(last_page)[1]
        if size != _whole_pages(nbytes) + mmap.PAGESIZE:
            raise PreconditionFailed(
                Reason.POOL_KIND_MISMATCH, f"the file has {size} bytes for a pool of {nbytes} bytes"
            )
        return cls(os.dup(fd), mapping, nbytes)

    @property
    def fd(self) -> int:
        """The writable descriptor, for the pool's own engine and never for a peer."""
        return self._fd

    @property
    def segments(self) -> tuple[Segment, ...]:
        return (Segment(self._address, self.nbytes),)

    @property
    def nonce_address(self) -> int:
        return self._address + self.nonce_offset

    def as_numpy(self) -> NDArray[np.uint8]:
        """Returns the pool's bytes, writable. Views of them keep the mapping alive beyond `close`."""
        return self._bytes[: self.nbytes]

    def keep_alive(self) -> object:
        """Returns an object that keeps the mapping while it is held, also beyond `close`."""
        return self._bytes

    def reopen_read_only(self) -> int:
        """Returns a new descriptor for a peer; the caller closes it.

        The descriptor is opened anew, because a duplicate would be as writable as the original.
        """
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def forbid_new_writers(self) -> None:
        """Stops every process from mapping or writing the pool anew, through any descriptor. Existing mappings stay
        writable. To be called when the engine has attached; the seal cannot be undone. Idempotent.

        Raises PreconditionFailed (FEATURE_UNAVAILABLE) on kernels before 5.1.
        """
        if fcntl.fcntl(self._fd, fcntl.F_GET_SEALS) & _F_SEAL_FUTURE_WRITE:
            return
        try:
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        except OSError as error:
            raise PreconditionFailed(
                Reason.FEATURE_UNAVAILABLE, f"the kernel cannot seal against writers: {error}"
            ) from error

    def seal(self) -> None:
        """Forbids new writers if the kernel can, else logs that others may write. Writers must have their mappings."""
        try:
            self.forbid_new_writers()
        except PreconditionFailed as error:
            _log.warning("other processes of this user can write into the pool: %s", error.message)

    def close(self) -> None:
        """Gives the memory back, at the latest when its last view is gone. Idempotent."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        self._bytes = np.empty(0, dtype=np.uint8)
        # A view that is still held keeps the mapping, rather than becoming a view of nothing.
        with contextlib.suppress(BufferError):
            self._mapping.close()


class PrivateMemory:
    """Consecutive allocations of this process; `owners` keeps them alive.

    Only addresses are known here: the owners must not move or free them while this object lives.
    """

    def __init__(self, segments: Iterable[Segment], owners: object = None) -> None:
        self.segments = tuple(segments)
        self.nbytes = sum(segment.nbytes for segment in self.segments)
        self._owners = owners
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._nonce_bytes = np.frombuffer(bytearray(self.nonce), dtype=np.uint8)
        if not self.segments or any(segment.nbytes <= 0 for segment in self.segments):
            raise InvalidRequest(Reason.INVALID_FIELD, "memory has segments of at least one byte")

    @classmethod
    def of(cls, *buffers: Any) -> Self:  # tensors, without importing torch here
        """Wraps Torch tensors (CPU, pinned or CUDA), numpy arrays, or any writable buffers, in order.

        Raises InvalidRequest for one that has gaps or cannot be written.
        """
        return cls([_segment(buffer) for buffer in buffers], owners=buffers)

    @property
    def nonce_address(self) -> int:
        return int(self._nonce_bytes.ctypes.data)

    def close(self) -> None:
        """Releases the allocations. Idempotent; the addresses are invalid afterwards.

        The nonce goes first: a peer that still reads finds another one after its last byte.
        """
        self._nonce_bytes[:] = np.frombuffer(secrets.token_bytes(NONCE_BYTES), dtype=np.uint8)
        self._owners = None


def check_sealed(fd: int) -> None:
    """Raises ValueError or OSError unless `fd` can neither shrink nor grow and has all its memory.

    Otherwise a reader of its mapping could die by a bus error.
    """
    needed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & needed != needed:
        raise ValueError("it is not sealed against shrinking and growing")
    status = os.fstat(fd)
    if status.st_blocks * 512 < status.st_size:  # st_blocks is in units of 512 bytes
        raise ValueError("it is not allocated in full")


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _allocate(fd: int, size: int) -> mmap.mmap:
    """Sets the size, maps all and takes every page now. Raises OSError if there are not enough."""
    os.ftruncate(fd, size)
    mapping = mmap.mmap(fd, size)
    address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
    # Huge pages cost fewer TLB misses; most kernels give shared memory none.
    with contextlib.suppress(OSError):
        libc.madvise(address, size, libc.MADV_HUGEPAGE)
    try:
        # Pages are taken through the mapping, since fallocate ignores the advice.
        libc.madvise(address, size, libc.MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        os.posix_fallocate(fd, 0, size)
    return mapping


def _segment(buffer: Any) -> Segment:
    if hasattr(buffer, "data_ptr"):
        return _tensor_segment(buffer)
    array = np.asarray(buffer) if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, "u1")
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise InvalidRequest(Reason.INVALID_FIELD, "a buffer must be writable and without gaps")
    return Segment(int(array.ctypes.data), array.nbytes)


def _tensor_segment(tensor: Any) -> Segment:
    # The tensor may be dense in any order of the dimensions: then its last element is at numel - 1.
    extent = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() and extent + 1 != tensor.numel():
        raise InvalidRequest(Reason.INVALID_FIELD, f"a tensor of shape {tuple(tensor.shape)} has gaps in memory")
    address, nbytes = int(tensor.data_ptr()), tensor.numel() * tensor.element_size()
    if tensor.is_cuda:
        return Segment(address, nbytes, MemoryKind.CUDA, int(tensor.device.index))
    if tensor.device.type != "cpu":
        raise InvalidRequest(Reason.INVALID_FIELD, f"no path moves bytes of {tensor.device}")
    kind = MemoryKind.PINNED_HOST if tensor.is_pinned() else MemoryKind.HOST
    return Segment(address, nbytes, kind)


def memory_bytes(segments: Iterable[Segment]) -> int:
    """Returns the length of the linear memory that runs through `segments`."""
    return sum([segment.nbytes for segment in segments])


def is_host(segments: Iterable[Segment]) -> bool:
    """Returns True if the processor can address all of it."""
    return all(segment.kind is not MemoryKind.CUDA for segment in segments)


def use_device(segments: Iterable[Segment]) -> None:
    """Directs the libraries that this thread calls to the memory's device; a new thread starts on the first one. Does
    nothing for memory of the host, or of several devices.
    """
    devices = {segment.device for segment in segments if segment.kind is MemoryKind.CUDA}
    if len(devices) != 1:
        return
    try:
        import torch

        torch.cuda.set_device(devices.pop())
    except Exception:  # noqa: BLE001 - logged; what does not work without it fails by itself, with its reason
        _log.exception("this thread could not be set to its rank's device")
