"""Path `cma`: the destination reads the source process's own memory with process_vm_readv.

For memory that an engine allocated itself, of the same user on the same host; the source's process
does nothing for it. Works on shared pools, too. Connecting holds the process by a pidfd before it
reads the nonce, so that the proof and every later byte are of one process and never of another that
got its number; after the last byte the process must still be alive and still show the nonce.

The kernel allows it under the rules for debuggers: same user, no protected process, no seccomp
filter against it, and where Yama restricts debuggers to parents the source admits its readers.
"""

import contextlib
import errno
import hmac
import os
import select
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvgrpc.core.descriptors import Runs
from kvgrpc.core.endpoints import CmaEndpoint, RankEndpoint, Segment
from kvgrpc.datapath import libc
from kvgrpc.datapath.addresses import Rows, check_runs, groups, to_rows
from kvgrpc.datapath.base import DataPathFailed, DataPathUnavailable
from kvgrpc.datapath.crew import Crew, PiecesPosting, piece_bytes
from kvgrpc.datapath.memory import NONCE_BYTES, PrivateMemory, SharedMemory, is_host, memory_bytes

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_YAMA_RESTRICTED = "1"
_SEGMENTS_MAX = 1 << 16
# User addresses end below it on every 64-bit machine, and sums of two of them fit 64 bits.
_ADDRESS_MAX = 1 << 62
_PID_MAX = 1 << 22  # PID_MAX_LIMIT of <linux/threads.h>


class CmaPath:
    """Offers this rank's memory to readers on this host, and reads that of peers.

    `peer_pid` names the one process that may read this one where Yama restricts readers; None
    admits all processes of this user, since Yama can only keep one name.
    """

    name = "cma"
    needs_polling = False

    def __init__(
        self,
        memory: SharedMemory | PrivateMemory,
        *,
        copy_threads: int = 2,
        peer_pid: int | None = None,
    ) -> None:
        self._memory = memory
        self._crew = Crew("kvgrpc-cma-copy", copy_threads)
        self._peer_pid = peer_pid
        self._admitted = False

    def offer(self, endpoint: RankEndpoint) -> RankEndpoint:
        if not is_host(self._memory.segments):
            raise DataPathUnavailable("this rank's memory is on a device")
        self._admit()
        memory = self._memory
        part = CmaEndpoint(os.getpid(), memory.segments, memory.nonce, memory.nonce_address)
        return replace(endpoint, cma=part)

    def connect(self, endpoint: RankEndpoint) -> "CmaRemote":
        part = endpoint.cma
        if part is None:
            raise DataPathUnavailable("the peer offers no reading of its memory")
        if not is_host([*self._memory.segments, *part.segments]):
            raise DataPathUnavailable("memory of one side is on a device")
        _check_endpoint(part)
        process = _Process(part)
        try:
            process.check()
        except DataPathFailed as error:
            process.close()
            raise DataPathUnavailable(error.message) from error
        return CmaRemote(process, part.segments, self._memory.segments, self._crew)

    def progress(self) -> None:
        """Has nothing to do: the kernel copies in the calling threads."""

    def close(self) -> None:
        """Ends the copy threads, after the piece that each is at."""
        self._crew.close()

    def _admit(self) -> None:
        """Where Yama lets only parents read, lets the peers read: once, at the first offer."""
        if self._admitted or _yama() != _YAMA_RESTRICTED:
            return
        try:
            libc.admit_tracer(self._peer_pid)
        except OSError as error:
            raise DataPathUnavailable(f"Yama lets no peer read this process: {error}") from error
        self._admitted = True


class CmaRemote:
    """A peer's process whose memory can be read."""

    def __init__(
        self,
        process: "_Process",
        source: tuple[Segment, ...],
        destination: tuple[Segment, ...],
        crew: Crew,
    ) -> None:
        self._process = process
        self._source = source
        self._source_bytes = memory_bytes(source)
        self._destination = destination
        self._destination_bytes = memory_bytes(destination)
        self._crew = crew

    @property
    def why(self) -> str:
        return (
            f"same host and user: {self._source_bytes} bytes of process {self._process.pid} are"
            f" read by {self._crew.size} threads (process_vm_readv, {libc.IOV_MAX} runs a call)"
        )

    def read(self, runs: Runs, wake: Callable[[], None]) -> PiecesPosting:
        check_runs(runs, self._source_bytes, self._destination_bytes)
        piece = piece_bytes(runs.total_bytes, self._crew.size)
        rows = to_rows(runs, self._source, self._destination, piece)
        ranges = groups(rows[:, 2], piece, libc.IOV_MAX)

        def copy_piece(i: int) -> None:
            first, end = ranges[i]
            self._process.read(rows[first:end])

        posting = PiecesPosting(len(ranges), copy_piece, wake, verify=self._process.check)
        self._crew.start(posting)
        return posting

    def close(self) -> None:
        """Lets go of the process. Idempotent."""
        self._process.close()


class _Process:
    """One process, held so that its number cannot come to mean another unnoticed."""

    def __init__(self, part: CmaEndpoint) -> None:
        """Raises DataPathUnavailable when there is no such process to hold."""
        self.pid = part.pid
        self._nonce = part.nonce
        self._nonce_address = part.nonce_address
        try:
            self._pidfd = os.pidfd_open(part.pid)
        except OSError as error:
            raise DataPathUnavailable(self._explain(error)) from error

    def check(self) -> None:
        """Raises DataPathFailed unless it shows its nonce and is alive after that."""
        nonce = np.zeros(NONCE_BYTES, dtype=np.uint8)
        self.read(np.array([(nonce.ctypes.data, self._nonce_address, NONCE_BYTES)], dtype=np.int64))
        if not hmac.compare_digest(nonce.tobytes(), self._nonce):
            raise DataPathFailed(f"process {self.pid} here is not the peer: it shows another nonce")
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if poll.poll(0):
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
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

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


def _after(rows: Rows, copied: int) -> Rows:
    """What is left of `rows` after their first `copied` bytes."""
    ends = np.cumsum(rows[:, 2])
    first = int(np.searchsorted(ends, copied, side="right"))
    left = rows[first:].copy()
    if len(left):
        into = copied - (int(ends[first]) - int(rows[first, 2]))
        left[0] += (into, into, -into)
    return left


def _check_endpoint(part: CmaEndpoint) -> None:
    """Raises DataPathUnavailable for numbers that the calls below would stumble over."""
    spans = [(segment.address, segment.nbytes) for segment in part.segments]
    spans.append((part.nonce_address, NONCE_BYTES))
    sane = all(0 < address < _ADDRESS_MAX and 0 < size < _ADDRESS_MAX for address, size in spans)
    total = sum(size for _, size in spans)
    if not (sane and total < _ADDRESS_MAX and 1 < len(spans) <= _SEGMENTS_MAX):
        raise DataPathUnavailable("the peer's list of its memory makes no sense")
    if not 0 < part.pid <= _PID_MAX or len(part.nonce) != NONCE_BYTES:
        raise DataPathUnavailable("the peer's process id or nonce makes no sense")


def _yama() -> str:
    """Who may debug whom, by Yama; empty where the kernel is without it."""
    with contextlib.suppress(OSError):
        return _YAMA.read_text().strip()
    return ""
