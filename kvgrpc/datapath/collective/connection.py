"""Finding and shutting down the connection of a process group, for which its library offers no call.

Each side has told the other at which address it listens, as the operating system writes addresses. A connection of this
process that begins at the one, or ends at the other, is theirs: every group listens at a port of its own.
"""

import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def shut_down(own: Iterable[bytes], peer: Iterable[bytes]) -> int:
    """Shuts down every connection between the addresses in what this side has told and in what the other one has;
    returns how many. Whoever waits for bytes of it is told that it is over.
    """
    own, peer, found = list(own), list(peer), 0
    for name in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError), _connection(int(name.name)) as connection:
            here, there = _bytes_of(connection.getsockname()), _bytes_of(connection.getpeername())
            if any(here in told for told in own) or any(there in told for told in peer):
                connection.shutdown(socket.SHUT_RDWR)
                found += 1
    return found


@contextmanager
def _connection(descriptor: int) -> Iterator[socket.socket]:
    """By a descriptor of our own: the one of that number may be closed, and be another's, at any time."""
    own = os.dup(descriptor)
    try:
        connection = socket.socket(fileno=own)
    except OSError:  # it is no socket
        os.close(own)
        raise
    with connection:
        yield connection


def _bytes_of(address: object) -> bytes:
    """An address as in a sockaddr_in, or sockaddr_in6. Raises OSError for one that is neither."""
    match address:
        case (str(host), int(port)):
            return struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_pton(socket.AF_INET, host)
        case (str(host), int(port), int(flow), int(_)):
            head = struct.pack("=H", socket.AF_INET6) + struct.pack("!HI", port, flow)
            return head + socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    raise OSError("no address of the internet")
