"""A rank's process as its peers on the same host see it: who it is, whether it lives, what stands in its memory.

A process number alone names nobody: it repeats, in time and across containers. So a peer holds the process by a pidfd
first and then reads the rank's nonce out of its memory; from then on the pidfd is that process, for good.

The kernel allows the reading under the rules for debuggers: same user, no protected process, no seccomp filter against
it, and where Yama restricts debuggers to parents a process admits its readers.
"""

import contextlib
import errno
import hmac
import os
import select
import weakref
from pathlib import Path

import numpy as np

from kvgrpc.core.endpoints import ProcessEndpoint
from kvgrpc.datapath import libc
from kvgrpc.datapath.addresses import Rows
from kvgrpc.datapath.base import DataPathFailed, DataPathUnavailable, Memory
from kvgrpc.datapath.memory import NONCE_BYTES

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_YAMA_RESTRICTED = "1"
# User addresses end below it on every 64-bit machine, and sums of two of them fit 64 bits.
ADDRESS_MAX = 1 << 62
_PID_MAX = 1 << 22  # PID_MAX_LIMIT of <linux/threads.h>


class OwnProcess:
    """This process, as it is offered to peers.

    `peer_pid` names the one process that may read this one where Yama restricts readers; None admits all processes of
    this user, since Yama can only keep one name.
    """

    def __init__(self, memory: Memory, peer_pid: int | None = None) -> None:
        self._memory = memory
        self._peer_pid = peer_pid
        self._admitted = False

    def offer(self) -> ProcessEndpoint:
        """Raises DataPathUnavailable where no peer may read this process."""
        self._admit()
        return ProcessEndpoint(os.getpid(), self._memory.nonce, self._memory.nonce_address)

    def _admit(self) -> None:
        """Where Yama lets only parents read, lets the peers read: once, at the first offer."""
        if self._admitted or _yama() != _YAMA_RESTRICTED:
            return
        try:
            libc.admit_tracer(self._peer_pid)
        except OSError as error:
            raise DataPathUnavailable(f"Yama lets no peer read this process: {error}") from error
        self._admitted = True


class ProcessEnd:
    """The end of one process, to be looked for; owns the pidfd."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd
        self._close = weakref.finalize(self, os.close, pidfd)

    @property
    def ended(self) -> bool:
        """Whether it is gone, with all its threads and its memory. For whoever has not closed this."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def another(self) -> "ProcessEnd":
        """The same once more, for somebody else to close."""
        return ProcessEnd(os.dup(self._pidfd))

    def close(self) -> None:
        """Lets go of it. Idempotent."""
        self._close()
        self._pidfd = -1


class HeldProcess:
    """One process, held so that its number cannot come to mean another unnoticed."""

    def __init__(self, endpoint: ProcessEndpoint) -> None:
        """Raises DataPathUnavailable for numbers that make no sense, and when there is no such process to hold."""
        sane = 0 < endpoint.nonce_address < ADDRESS_MAX and len(endpoint.nonce) == NONCE_BYTES
        if not (sane and 0 < endpoint.pid <= _PID_MAX):
            raise DataPathUnavailable("the peer's process id or nonce makes no sense")
        self.pid = endpoint.pid
        self._nonce = endpoint.nonce
        self._nonce_address = endpoint.nonce_address
        try:
            self.end = ProcessEnd(os.pidfd_open(endpoint.pid))
        except OSError as error:
            raise DataPathUnavailable(self._explain(error)) from error

    @property
    def ended(self) -> bool:
        """See ProcessEnd."""
        return self.end.ended

    def check(self) -> None:
        """Raises DataPathFailed unless it shows its nonce and is alive after that."""
        nonce = np.zeros(NONCE_BYTES, dtype=np.uint8)
        self.read(np.array([(nonce.ctypes.data, self._nonce_address, NONCE_BYTES)], dtype=np.int64))
        if not hmac.compare_digest(nonce.tobytes(), self._nonce):
            raise DataPathFailed(f"process {self.pid} here is not the peer: it shows another nonce")
        if self.ended:
            raise DataPathFailed(f"the peer's process {self.pid} has ended")

    def read(self, rows: Rows) -> None:
        """Copies at most `IOV_MAX` rows. Raises DataPathFailed; some bytes may have arrived."""
        while len(rows):
            local = np.ascontiguousarray(rows[:, [0, 2]])
            remote = np.ascontiguousarray(rows[:, [1, 2]])
            try:
                copied = libc.process_vm_readv(self.pid, local.ctypes.data, remote.ctypes.data, len(rows))
            except OSError as error:
                raise DataPathFailed(self._explain(error)) from error
            if not copied:
                raise DataPathFailed(f"process {self.pid} gave no byte at {int(rows[0, 1]):#x}")
            rows = _after(rows, copied)

    def close(self) -> None:
        """Lets go of it. Idempotent."""
        self.end.close()

    def _explain(self, error: OSError) -> str:
        """What the kernel's number means here, for people."""
        meaning = {
            errno.EPERM: "the kernel forbids it: another user, a protected process, a seccomp"
            f" filter, or Yama (ptrace_scope {_yama() or 'not present'})",
            errno.ESRCH: "there is no such process, or not in this process's PID namespace",
            errno.EFAULT: "memory that the peer named is not mapped in its process or in this one",
            errno.ENOSYS: "this kernel does not have the call",
            errno.EINVAL: "the kernel refuses the lengths",
            errno.ENOMEM: "the kernel has no memory for it",
        }.get(error.errno or 0, "unexpected")
        return f"cannot read process {self.pid}: {error.strerror} ({meaning})"


def hold(endpoint: ProcessEndpoint) -> HeldProcess:
    """The process, held and proved to be the peer's. Raises DataPathUnavailable."""
    process = HeldProcess(endpoint)
    try:
        process.check()
    except DataPathFailed as error:
        process.close()
        raise DataPathUnavailable(error.message) from error
    return process


def _after(rows: Rows, copied: int) -> Rows:
    """What is left of `rows` after their first `copied` bytes."""
    ends = np.cumsum(rows[:, 2])
    first = int(np.searchsorted(ends, copied, side="right"))
    left = rows[first:].copy()
    if len(left):
        into = copied - (int(ends[first]) - int(rows[first, 2]))
        left[0] += (into, into, -into)
    return left


def _yama() -> str:
    """Who may debug whom, by Yama; empty where the kernel is without it."""
    with contextlib.suppress(OSError):
        return _YAMA.read_text().strip()
    return ""
