"""What a rank asks the process of a peer on this host before it connects, and what the process answers.

A peer's endpoint names a unix socket and a token, and both are the peer's mere word. What the kernel says of the socket
is not: which process listens there, and of which user it is. `process` makes a proof of it.
"""

import os
import secrets
import select
import weakref
from dataclasses import dataclass, field

CHALLENGE_BYTES = 32
TOKEN_BYTES = 32
RANK_BYTES = 2
RANKS_MAX = 4096
"""Numbers of asking ranks are below."""
REASON_BYTES_MAX = 200
PAYLOAD_BYTES_MAX = 64
DESCRIPTORS_MAX = 253
"""What the kernel lets one packet carry (SCM_MAX_FD)."""
ANSWERED, REFUSED = b"\0", b"\1"
"""What an answer begins with."""


class ProcessEnd:
    """The end of one process, to be looked for; owns the pidfd."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd
        self._close = weakref.finalize(self, os.close, pidfd)

    @property
    def ended(self) -> bool:
        """Whether it is gone, with all its threads and its memory. For a caller that has not closed this."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def another(self) -> "ProcessEnd":
        """The same once more, for another caller to close."""
        return ProcessEnd(os.dup(self._pidfd))

    def close(self) -> None:
        """Lets go of it. Idempotent."""
        self._close()
        self._pidfd = -1


@dataclass(frozen=True)
class Question:
    """One packet to one socket: the token that the peer gave for it, and a challenge of our own."""

    socket_path: str
    token: bytes
    challenge: bytes = field(default_factory=lambda: secrets.token_bytes(CHALLENGE_BYTES))
    descriptors: int = 1
    """How many may come with the answer, at most DESCRIPTORS_MAX; an answer with more is none."""


@dataclass
class Answer:
    """What came back, and who listens at the other end: the process that called listen(), by the kernel's word."""

    question: Question
    pid: int
    """As this process sees it; 0: it does not."""
    end: ProcessEnd | None
    """Held from before the process was asked. None where it cannot be."""
    payload: bytes
    fds: tuple[int, ...] = ()

    def take_fds(self) -> tuple[int, ...]:
        """The descriptors that came with it, for the caller to close."""
        fds, self.fds = self.fds, ()
        return fds

    def take_end(self) -> ProcessEnd | None:
        """The process, for the caller to close."""
        end, self.end = self.end, None
        return end

    def close(self) -> None:
        """Lets go of what was not taken. Idempotent."""
        if self.end is not None:
            self.end.close()
        for fd in self.take_fds():
            os.close(fd)
