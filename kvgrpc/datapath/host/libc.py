"""C library calls that Python lacks, typed. Each releases the interpreter lock while it runs.

Every function here takes plain addresses: its caller has checked that they may be read and written.
"""

import ctypes
import errno
import os
import sys

_LIBC = ctypes.CDLL(None, use_errno=True)

# <linux/mman.h>; MADV_POPULATE_WRITE since Linux 5.14.
MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23
# <linux/memfd.h>, since Linux 6.3.
_MFD_NOEXEC_SEAL = 0x8
# <linux/prctl.h>: "Yama", and its wildcard.
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = 2 ** (8 * ctypes.sizeof(ctypes.c_ulong)) - 1

IOV_MAX = 1024
"""Maximum number of runs that one call of `process_vm_readv` takes on either side (UIO_MAXIOV)."""

memmove = _LIBC.memmove
"""memmove(destination, source, nbytes)."""
memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
memmove.restype = None

_madvise = _LIBC.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_prctl = _LIBC.prctl
_prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4

_process_vm_readv = getattr(_LIBC, "process_vm_readv", None)  # some C libraries lack it
if _process_vm_readv is not None:
    _process_vm_readv.restype = ctypes.c_ssize_t
    _process_vm_readv.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]


def _error(number: int | None = None) -> OSError:
    code = ctypes.get_errno() if number is None else number
    return OSError(code, os.strerror(code))


def madvise(address: int, nbytes: int, advice: int) -> None:
    """Calls madvise. Raises OSError with the call's errno."""
    if _madvise(address, nbytes, advice):
        raise _error()


def process_vm_readv(pid: int, local: int, remote: int, count: int) -> int:
    """Copies `count` (at most IOV_MAX) runs out of process `pid`; returns the bytes copied.

    `local` and `remote` are addresses of `count` pairs (address, nbytes) of 64-bit integers. Fewer bytes are copied if
    the peer's memory ends early. Raises OSError.
    """
    if _process_vm_readv is None:
        raise _error(errno.ENOSYS)
    copied = int(_process_vm_readv(pid, local, count, remote, count, 0))
    if copied < 0:
        raise _error()
    return copied


def admit_tracer(pid: int | None) -> None:
    """Lets process `pid`, or with None any process of this user, read this process under Yama.

    The process replaces the one admitted before, since Yama keeps only one. Raises OSError.
    """
    if _prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY if pid is None else pid, 0, 0, 0):
        raise _error()


def memfd(name: str) -> int:
    """Makes an anonymous file in memory that can be sealed and, if the kernel supports that, never be executed."""
    if sys.platform != "linux":
        raise _error(errno.ENOSYS)
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.memfd_create(name, flags)
