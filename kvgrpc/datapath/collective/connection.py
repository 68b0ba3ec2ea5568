"""Finding, tuning and shutting down the connection of a process group, for which its library offers no call.

Each side has told the other at which address it listens. A connection of this process that begins at the one, or ends
at the other, is theirs: every group listens at a port of its own. A peer may tell any address, so what was connected
before the group was made is never taken for its own.
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
"""Of this process, by their inodes."""
NEAR_UNSENT_BYTES = 512 << 10
"""How far the sender of a connection within a machine may be ahead of its receiver, which then reads from the
processor's cache.
"""
NEAR_US = 20
"""The least round trip of a connection within a machine is at most that. So many bytes in that time are 26 GB/s: a peer
on another machine that is as near loses nothing.
"""
_MIN_RTT = struct.Struct("=148xI")
"""In Linux's struct tcp_info: the least round trip that was seen, in microseconds."""
_SO_ATTACH_FILTER = 26
"""Linux's, which the module socket does not name."""
_RETURN_NOTHING = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0), 8)
"""The one instruction of a packet filter that lets nothing pass."""
_DROP_ALL = struct.pack("@HP", 1, ctypes.addressof(_RETURN_NOTHING))


def sockets() -> Sockets:
    """All that there are."""
    return frozenset(inode for _, inode in _sockets())


def connections(own: Iterable[Address], peer: Iterable[Address], before: Sockets) -> Sockets:
    """Those between the addresses that this side has told and those that the other one has, which were not there
    before.
    """
    own, peer, found = set(own), set(peer), set[int]()
    for descriptor, inode in _sockets():
        if inode in before:
            continue
        with suppress(OSError), _socket(descriptor, inode) as connection:
            there = _address_of(connection.getpeername())  # one that only listens has none
            if there in peer or _address_of(connection.getsockname()) in own:
                found.add(inode)
    return frozenset(found)


def admit_nobody_else(own: Iterable[Address], before: Sockets) -> None:
    """Who is not connected to these addresses of this process yet never will be: the system drops what he says. The
    library cannot stop listening without ending its connections, and takes a descriptor for each stranger.
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
    """Whoever waits for bytes of these connections is told that they are over."""
    _each(which, lambda connection: connection.shutdown(socket.SHUT_RDWR))


def bound_what_is_unsent(which: Sockets) -> None:
    """Bounds how far the sender of each may be ahead of its receiver, where both are near. The operating system lets it
    be megabytes ahead, which leave the processor's cache before they are read. Of a peer that is far the operating
    system knows best how much is to be under way.
    """
    _each(which, lambda connection: bound_if_near(connection, round_trip_us(connection)))


def bound_if_near(connection: socket.socket, least_round_trip_us: int | None) -> None:
    """`least_round_trip_us` None: it is not known."""
    if least_round_trip_us is not None and least_round_trip_us <= NEAR_US:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, NEAR_UNSENT_BYTES)


def round_trip_us(connection: socket.socket) -> int | None:
    """The least round trip that a connection has seen; None where the system does not say."""
    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.size)
    return int(_MIN_RTT.unpack(told)[0]) if len(told) == _MIN_RTT.size else None


def _each(which: Sockets, work: Callable[[socket.socket], None]) -> None:
    for descriptor, inode in _sockets():
        if inode in which:
            with suppress(OSError), _socket(descriptor, inode) as connection:
                work(connection)


def _sockets() -> Iterator[tuple[int, int]]:
    """Descriptors and inodes. Other descriptors are not touched: closing a copy of a file's gives up its locks."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # closed meanwhile
            found = entry.stat()
            if stat.S_ISSOCK(found.st_mode):
                yield int(entry.name), found.st_ino


@contextmanager
def _socket(descriptor: int, inode: int) -> Iterator[socket.socket]:
    """By a descriptor of our own: the one of that number may be closed, and be another's, at any time. Raises OSError
    where it is another's.
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
    """Raises OSError for the name of a socket that is not of the internet."""
    match name:
        case (str(host), int(port)):
            return socket.inet_pton(socket.AF_INET, host), port
        case (str(host), int(port), int(_), int(_)):
            return socket.inet_pton(socket.AF_INET6, host.partition("%")[0]), port
    raise OSError("no address of the internet")
