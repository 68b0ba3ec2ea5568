"""Finds, tunes and shuts down the connections of a process group, for which its library offers no call.

Each side has told the other the addresses at which it listens. A connection of this process that starts or ends at one
of these addresses belongs to the group, since every group listens at ports of its own. A peer may state any address, so
a connection from before the group was made is never taken for the group's.
"""

import ctypes
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvgrpc.datapath.collective.half import Address

Sockets = frozenset[int]
"""Sockets of this process, by their inodes."""
NEAR_UNSENT_BYTES = 512 << 10
"""Maximum bytes that the sender of a connection within a machine may be ahead of its receiver, which then reads from
the processor's cache.
"""
NEAR_US = 20
"""Maximum of the least round trip within a machine, in microseconds. NEAR_UNSENT_BYTES in that time are 26 GB/s, so a
peer on another machine that is as near loses nothing.
"""
_MIN_RTT = struct.Struct("=148xI")
"""The least round trip seen, in microseconds, in Linux's struct tcp_info."""
_SO_ATTACH_FILTER = 26
"""Socket option of Linux that the module `socket` does not name."""
_RETURN_NOTHING = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0), 8)
"""The one instruction of a packet filter that drops everything."""
_DROP_ALL = struct.pack("@HP", 1, ctypes.addressof(_RETURN_NOTHING))


def sockets() -> Sockets:
    """Returns all sockets of this process."""
    return frozenset(inode for _, inode in _sockets())


def connections(own: Iterable[Address], peer: Iterable[Address], before: Sockets) -> Sockets:
    """Returns the connections between the addresses of this side and of the other one, without those that existed
    before.
    """
    own, peer, found = set(own), set(peer), set[int]()
    for descriptor, inode in _sockets():
        if inode in before:
            continue
        with suppress(OSError), _socket(descriptor, inode) as connection:
            there = _address_of(connection.getpeername())  # a socket that only listens has no peer
            if there in peer or _address_of(connection.getsockname()) in own:
                found.add(inode)
    return frozenset(found)


def admit_nobody_else(own: Iterable[Address], before: Sockets) -> None:
    """Keeps everybody else from connecting to these addresses: the system drops all packets to them. The library cannot
    stop listening without ending its connections, and takes a descriptor for each stranger.
    """
    own = set(own)
    for descriptor, inode in _sockets():
        if inode in before:
            continue
        with suppress(OSError), _socket(descriptor, inode) as listener:
            listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens and _address_of(listener.getsockname()) in own:
                listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _DROP_ALL)


def shut_down(which: Sockets) -> None:
    """Ends these connections: a thread that waits for their bytes is told that they are over."""
    _each(which, lambda connection: connection.shutdown(socket.SHUT_RDWR))


def bound_what_is_unsent(which: Sockets) -> None:
    """Bounds how far the sender of each connection may be ahead of a near receiver. The operating system allows
    megabytes, which leave the processor's cache before they are read. For a far peer the operating system knows best
    how much should be in flight.
    """
    _each(which, lambda connection: bound_if_near(connection, round_trip_us(connection)))


def bound_if_near(connection: socket.socket, least_round_trip_us: int | None) -> None:
    """Bounds a connection's unsent bytes if the peer is near; a round trip of None is unknown."""
    if least_round_trip_us is not None and least_round_trip_us <= NEAR_US:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, NEAR_UNSENT_BYTES)


def round_trip_us(connection: socket.socket) -> int | None:
    """Returns the least round trip that a connection has seen, in microseconds; None if the system does not say."""
    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.size)
    return int(_MIN_RTT.unpack(told)[0]) if len(told) == _MIN_RTT.size else None


def _each(which: Sockets, work: Callable[[socket.socket], None]) -> None:
    for descriptor, inode in _sockets():
        if inode in which:
            with suppress(OSError), _socket(descriptor, inode) as connection:
                work(connection)


def _sockets() -> Iterator[tuple[int, int]]:
    """Yields descriptors and inodes of sockets. No others are opened: closing a copy of a file's gives up its locks."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # closed meanwhile
            found = entry.stat()
            if stat.S_ISSOCK(found.st_mode):
                yield int(entry.name), found.st_ino


@contextmanager
def _socket(descriptor: int, inode: int) -> Iterator[socket.socket]:
    """Opens a socket by a descriptor of its own, since the given number may be closed and reused at any time. Raises
    OSError if it was reused.
    """
    own = os.dup(descriptor)
    try:
        if os.fstat(own).st_ino != inode:
            raise OSError("the descriptor is another's by now")
        connection = socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise
    with connection:
        yield connection


def _address_of(name: object) -> Address:
    """Returns the address of a socket's name. Raises OSError if it is no internet address."""
    match name:
        case (str(host), int(port)):
            return socket.inet_pton(socket.AF_INET, host), port
        case (str(host), int(port), int(_), int(_)):
            return socket.inet_pton(socket.AF_INET6, host.partition("%")[0]), port
    raise OSError("no address of the internet")
