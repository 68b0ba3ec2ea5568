"""A rank's process as peers on the same host see it: its identity, its life, and the content of its memory.

A peer's own statements prove nothing. A process number repeats, in time and across containers, and it may be that of a
bystander, of another rank, or our own; the same holds for a socket's path. So three things must come together:

* the process is the one that listens at the peer's socket, according to the kernel, and never our own;
* it is held by a pidfd before it is asked anything, and lives after the last byte: all was read from that one process;
* a challenge of our own, which it is asked to keep, is found in its memory by the call that will read the blocks, in a
  digest over what it offers. So it states itself which memory may be read. A peer that names the socket of another
  rank can have nothing read there except what that rank offers to all its peers.

The kernel allows the reading under the rules for debuggers: same user, no protected process, no seccomp filter against
it, and where Yama restricts debuggers to parents a process admits its readers.
"""

import contextlib
import errno
import hashlib
import hmac
import os
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from kvgrpc.core.values.endpoints import ProcessEndpoint, Segment
from kvgrpc.datapath.base import DataPathFailed, DataPathUnavailable, Memory
from kvgrpc.datapath.host import libc
from kvgrpc.datapath.host.addresses import Rows
from kvgrpc.datapath.host.memory import NONCE_BYTES
from kvgrpc.datapath.host.process_socket import ProcessSocket, SocketReply
from kvgrpc.datapath.questions import Answer, ProcessEnd

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_YAMA_RESTRICTED = "1"
# User addresses end below it on every 64-bit machine, and sums of two of them fit 64 bits.
ADDRESS_MAX = 1 << 62
_ADDRESSES = struct.Struct("<QQ")  # addresses of the proof and of the memory's nonce
_PROOF_BYTES = 32
_INSTEAD = "give each a process of its own, or allow nixl or collective"


class OwnProcess:
    """This process, as it proves itself to peers."""

    def __init__(self, memory: Memory, socket: ProcessSocket) -> None:
        self._memory = memory
        self._socket = socket
        self._admitted: int | None = None
        """Id of the process that Yama lets read this one; 0: any process of this user."""

    def offer(self, peer: str, data_path: str, offered: bytes) -> ProcessEndpoint:
        """Makes an endpoint. `offered` is the digest of its offer. Raises DataPathUnavailable if no peer can ask."""

        def answer(challenge: bytes, pid: int) -> SocketReply:
            self._admit(pid)
            address, nonce = self._memory.nonce_address, self._memory.nonce
            proof = np.frombuffer(bytearray(_proof(challenge, address, nonce, offered)), dtype=np.uint8)
            return SocketReply(_ADDRESSES.pack(proof.ctypes.data, address), keeps=proof)

        return ProcessEndpoint(*self._socket.mint(peer, data_path, answer))

    def _admit(self, pid: int) -> None:
        """Lets this peer read if Yama lets only parents read. From the second peer on it admits all processes of this
        user, since Yama keeps one id. Raises OSError.
        """
        if self._admitted in (0, pid) or _yama() != _YAMA_RESTRICTED:
            return
        admitted = pid if self._admitted is None else 0
        libc.admit_tracer(admitted or None)
        self._admitted = admitted


class HeldProcess:
    """A peer's process, held so that its number cannot come to mean another process unnoticed; see `prove`."""

    def __init__(self, pid: int, end: ProcessEnd) -> None:
        self.pid = pid
        self.end = end
        self._nonce = b""
        self._nonce_address = 0

    @property
    def ended(self) -> bool:
        return self.end.ended

    def show(self, proof_address: int, nonce_address: int, challenge: bytes, offered: bytes) -> None:
        """Finds the proof in the process's memory. Raises DataPathFailed if it is not there."""
        both = np.zeros((2, NONCE_BYTES), dtype=np.uint8)
        rows = [(both[0].ctypes.data, proof_address, _PROOF_BYTES), (both[1].ctypes.data, nonce_address, NONCE_BYTES)]
        self.read(np.array(rows, dtype=np.int64))
        nonce = both[1].tobytes()
        if not hmac.compare_digest(both[0].tobytes(), _proof(challenge, nonce_address, nonce, offered)):
            raise DataPathFailed(f"process {self.pid} is not the peer: it shows another answer than was asked for")
        self._nonce, self._nonce_address = nonce, nonce_address

    def check(self) -> None:
        """Raises DataPathFailed unless its memory still shows the nonce, and it is alive after that."""
        nonce = np.zeros(NONCE_BYTES, dtype=np.uint8)
        self.read(np.array([(nonce.ctypes.data, self._nonce_address, NONCE_BYTES)], dtype=np.int64))
        if not hmac.compare_digest(nonce.tobytes(), self._nonce):
            raise DataPathFailed(f"process {self.pid} has not the peer's memory any more: it shows another nonce")
        if self.ended:
            raise DataPathFailed(f"the peer's process {self.pid} has ended")

    def read(self, rows: Rows) -> None:
        """Copies rows, `IOV_MAX` a call. Raises DataPathFailed; some bytes may have arrived."""
        while len(rows):
            some = rows[: libc.IOV_MAX]
            local = np.ascontiguousarray(some[:, [0, 2]])
            remote = np.ascontiguousarray(some[:, [1, 2]])
            try:
                copied = libc.process_vm_readv(self.pid, local.ctypes.data, remote.ctypes.data, len(some))
            except OSError as error:
                raise DataPathFailed(self._explain(error)) from error
            if not copied:
                raise DataPathFailed(f"process {self.pid} gave no byte at {int(rows[0, 1]):#x}")
            rows = _after(rows, copied)

    def close(self) -> None:
        """Lets go of the process. Idempotent."""
        self.end.close()

    def _explain(self, error: OSError) -> str:
        """Returns the meaning of the kernel's error number here, as text."""
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


def prove(answer: Answer | str, offered: bytes) -> HeldProcess:
    """Returns the process that answered, held and proved to make that offer. Raises DataPathUnavailable."""
    if isinstance(answer, str):
        raise DataPathUnavailable(answer)
    if answer.pid == os.getpid():
        raise DataPathUnavailable(f"the peer names process {answer.pid}, which is this very one: {_INSTEAD}")
    if len(answer.payload) != _ADDRESSES.size:
        raise DataPathUnavailable("the peer's process proves nothing")
    proof_address, nonce_address = _ADDRESSES.unpack(answer.payload)
    if not (0 < proof_address < ADDRESS_MAX and 0 < nonce_address < ADDRESS_MAX):
        raise DataPathUnavailable("the peer's process names addresses that make no sense")
    end = answer.take_end()
    if end is None:
        raise DataPathUnavailable("the peer's process is gone, or not in this process's PID namespace")
    process = HeldProcess(answer.pid, end)
    try:
        process.show(proof_address, nonce_address, answer.question.challenge, offered)
        process.check()
    except DataPathFailed as error:
        process.close()
        raise DataPathUnavailable(error.message) from error
    return process


def digest(segments: Iterable[Segment], *names: bytes) -> bytes:
    """Returns the digest of an offer of memory and of its names."""
    whole = hashlib.sha256(b"".join(struct.pack("<Q", len(name)) + name for name in names))
    for segment in segments:
        whole.update(f"|{segment.address},{segment.nbytes},{segment.kind.value},{segment.device}".encode())
    return whole.digest()


def _proof(challenge: bytes, nonce_address: int, nonce: bytes, offered: bytes) -> bytes:
    """Returns the proof that a process has in its memory for as long as its token is valid."""
    address = nonce_address.to_bytes(8, "little")
    return hashlib.sha256(b"kvgrpc process" + challenge + address + nonce + offered).digest()


def _after(rows: Rows, copied: int) -> Rows:
    """Returns what is left of `rows` after their first `copied` bytes."""
    ends = np.cumsum(rows[:, 2])
    first = int(np.searchsorted(ends, copied, side="right"))
    left = rows[first:].copy()
    if len(left):
        into = copied - (int(ends[first]) - int(rows[first, 2]))
        left[0] += (into, into, -into)
    return left


def _yama() -> str:
    """Returns Yama's restriction of debuggers; empty if the kernel has no Yama."""
    with contextlib.suppress(OSError):
        return _YAMA.read_text().strip()
    return ""
