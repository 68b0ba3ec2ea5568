"""Questions that a rank asks the process of a peer on this host before it connects, and their answers.

A peer's endpoint names a unix socket and a token, and both are only the peer's claim. The kernel says which process
listens at the socket, and of which user it is. `process` makes a proof of that.
"""

import os
import secrets
import select
import weakref
from dataclasses import dataclass, field

from kvgrpc.datapath.shared_folder import SharedFolder

CHALLENGE_BYTES = 32
TOKEN_BYTES = 32
RANK_BYTES = 2
RANKS_MAX = 4096
"""Upper bound of the numbers of asking ranks, exclusive."""
REASON_BYTES_MAX = 200
PAYLOAD_BYTES_MAX = 64
DESCRIPTORS_MAX = 253
"""Maximum number of descriptors that the kernel lets one packet carry (SCM_MAX_FD)."""
ANSWERED, REFUSED = b"\0", b"\1"
"""First byte of an answer."""


class ProcessEnd:
    """Watches for the end of one process; owns the pidfd."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd
        self._close = weakref.finalize(self, os.close, pidfd)

    @property
    def ended(self) -> bool:
        """True if the process is gone, with all its threads and its memory. Must not be used after `close`."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def another(self) -> "ProcessEnd":
        """Returns a copy for another caller to close."""
        return ProcessEnd(os.dup(self._pidfd))

    def close(self) -> None:
        """Closes the pidfd. Idempotent."""
        self._close()
        self._pidfd = -1


@dataclass(frozen=True)
class Question:
    """One packet to one socket: the token that the peer gave for it, and a challenge of our own."""

    socket_path: str
    token: bytes
    challenge: bytes = field(default_factory=lambda: secrets.token_bytes(CHALLENGE_BYTES))
    descriptors: int = 1
    """Number of descriptors that may come with the answer, at most DESCRIPTORS_MAX. An answer with more is rejected."""
    folder: SharedFolder | None = None
    """Folder in which the socket is looked for first."""


@dataclass
class Answer:
    """An answer, and the process that called listen() at the other end, according to the kernel."""

    question: Question
    pid: int
    """Process id as this process sees it; 0 if it is not visible."""
    end: ProcessEnd | None
    """End of the process, held since before it was asked. None if it cannot be held."""
    payload: bytes
    fds: tuple[int, ...] = ()

    def take_fds(self) -> tuple[int, ...]:
        """Returns the descriptors of the answer, for the caller to close."""
        fds, self.fds = self.fds, ()
        return fds

    def take_end(self) -> ProcessEnd | None:
        """Returns the process's end, for the caller to close."""
        end, self.end = self.end, None
        return end

    def close(self) -> None:
        """Closes what was not taken. Idempotent."""
        if self.end is not None:
            self.end.close()
        for fd in self.take_fds():
            os.close(fd)
