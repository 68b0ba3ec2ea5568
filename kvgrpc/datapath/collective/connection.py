"""Finding, tuning and shutting down the connection of a process group, for which its library offers no call.

Each side has told the other at which address it listens, as the operating system writes addresses. A connection of this
process that begins at the one, or ends at the other, is theirs: every group listens at a port of its own.
"""

import os
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NEAR_UNSENT_BYTES = 512 << 10
"""What a connection within a machine has unread, at most: it is read from the processor's cache."""
NEAR_US = 100
"""Round trip of a connection within a machine, at most. So many bytes in that time are 5 GB/s, more than one thread of
a process group moves: a peer on another machine that is as near loses nothing.
"""
_MIN_RTT = struct.Struct("=148xI")
"""In Linux's struct tcp_info: the least round trip that was seen, in microseconds."""


def shut_down(own: Iterable[bytes], peer: Iterable[bytes]) -> int:
    """Shuts down every connection between the addresses in what this side has told and in what the other one has;
    returns how many. Whoever waits for bytes of it is told that it is over.
    """
    return _each(own, peer, lambda connection: connection.shutdown(socket.SHUT_RDWR))


def bound_what_is_unread(own: Iterable[bytes], peer: Iterable[bytes]) -> int:
    """Bounds how far the sender of each such connection may be ahead of its receiver where both are near; returns how
    many connections there are. The operating system lets it be megabytes ahead, which leave the processor's cache
    before they are read. Of a peer that is far the operating system knows best how much is to be under way.
    """
    return _each(own, peer, _bound_if_near)


def is_near(round_trip_us: int) -> bool:
    """Whether a connection with this least round trip is one within a machine."""
    return 0 < round_trip_us <= NEAR_US


def round_trip_us(connection: socket.socket) -> int:
    """The least round trip that a connection has seen; 2^32 - 1 where it has seen none."""
    (found,) = _MIN_RTT.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.size))
    return int(found)


def _bound_if_near(connection: socket.socket) -> None:
    if is_near(round_trip_us(connection)):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, NEAR_UNSENT_BYTES)


def _each(own: Iterable[bytes], peer: Iterable[bytes], work: Callable[[socket.socket], None]) -> int:
    own, peer, found = list(own), list(peer), 0
    for name in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError), _connection(int(name.name)) as connection:
            here, there = _bytes_of(connection.getsockname()), _bytes_of(connection.getpeername())
            if any(here in told for told in own) or any(there in told for told in peer):
                work(connection)
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
