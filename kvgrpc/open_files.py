"""The system's limit of open files, and a reserve below it that connecting processes cannot take.

A process without a free descriptor can neither dial a peer nor take a worker's memory, and libraries in it end it. So
sockets at which strangers connect are doors: they let in only as many as leave the reserve free, and the others wait.
"""

import errno
import logging
import os
import resource
import socket
import struct
import sys
import time
from pathlib import Path

_log = logging.getLogger(__name__)

RESERVE = 64
"""Number of descriptors in reserve; a quarter of a limit that is lower than four times this."""
PAUSE_S = 0.1
"""Time that a full door stays closed, in seconds."""
SAY_AGAIN_S = 60.0
NONE_LEFT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}
"""Errors for want of descriptors or of memory."""
_DESCRIPTOR = struct.Struct("=i")


def received_with_descriptor(connection: socket.socket, nbytes: int) -> tuple[bytes, list[int]]:
    """Returns at most `nbytes` bytes and at most one descriptor, which no child inherits. Further ones are closed.

    socket.recv_fds ignores its flags, so that what it returns is inherited.
    """
    room = socket.CMSG_LEN(_DESCRIPTOR.size)
    said, rights, _, _ = connection.recvmsg(nbytes, room, socket.MSG_CMSG_CLOEXEC)
    return said, [number for _, _, data in rights for (number,) in _DESCRIPTOR.iter_unpack(data)]


def limit() -> int:
    """Returns the maximum number of descriptors of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def raise_limit() -> None:
    """Raises the limit to the highest that the system allows this process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def unreserved() -> int:
    """Returns the maximum number of descriptors of this process without the reserve."""
    most = limit()
    return most - min(RESERVE, most // 4)


def spare(count: int) -> bool:
    """Returns whether `count` descriptors are free without the reserve."""
    return len(list(Path("/proc/self/fd").iterdir())) + count <= unreserved()


class Door:
    """A listening socket that does not block. `who` names the connecting processes, for the log."""

    def __init__(self, listener: socket.socket, who: str) -> None:
        self._listener = listener
        self._who = who
        self._say_at = 0.0
        self.full = False
        """True when the next connection had no descriptor: accept again after PAUSE_S."""

    def accept(self) -> socket.socket | None:
        """Returns the next connection; None if nobody waits or the door is full."""
        try:
            next_number = os.dup(self._listener.fileno())  # the lowest free number, which the next connection gets
            os.close(next_number)
            self.full = next_number >= unreserved()
            if not self.full:
                return self._listener.accept()[0]
        except OSError as error:
            self.full = error.errno in NONE_LEFT
        if self.full and time.monotonic() >= self._say_at:
            self._say_at = time.monotonic() + SAY_AGAIN_S
            _log.warning("%s wait: this process may have %d open files, and has none to spare", self._who, limit())
        return None
