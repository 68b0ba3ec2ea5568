"""The unix socket of the sessions: made, checked and removed, and the frames of its connections."""

import asyncio
import contextlib
import os
import select
import socket
import stat
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from kvgrpc.errors import PermissionDenied, Reason, invalid
from kvgrpc.open_files import PAUSE_S, Door
from kvgrpc.session.v1 import session_pb2
from kvgrpc.wire.fields import check
from kvgrpc.wire.frames import FrameReader

READ_BYTES = 256 * 1024
PROBE_TIMEOUT_S = 1.0
BACKLOG = 128
"""Maximum number of connections that wait to be accepted."""

Frames = AsyncIterator[session_pb2.ClientFrame]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


File = tuple[int, int]
"""Device and inode of a socket's file. Its path may be another server's by now."""


class SessionSocket:
    """Socket for processes of this user; `serve` serves each connection. It replaces asyncio's own server, which logs
    every connection for which there is no descriptor, and removes a socket that another server has bound meanwhile.
    """

    def __init__(self, path: str, serve: Serve) -> None:
        """Listens; the socket is this user's alone. Raises InvalidRequest if the path cannot be used."""
        _make_room(path)
        self._path, self._serve = path, serve
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._connected: set[asyncio.Task[None]] = set()
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(path)
            os.chmod(path, 0o600)  # noqa: PTH101 - one system call
            self._file = _file(path)
            self._listener.listen(BACKLOG)
        except (OSError, ValueError) as error:
            self._listener.close()
            raise invalid("session_socket", f"{path} cannot be bound: {error}") from error
        self._listener.setblocking(False)
        self._door = Door(self._listener, f"processes that connect to {path}")
        self._open()

    def close(self) -> None:
        """Removes the socket and accepts nothing more. Idempotent."""
        if self._listener.fileno() < 0:
            return
        remove(self._path, self._file)  # first: no other file gets its number while it listens
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()

    def _open(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        connection = self._door.accept()
        if connection is not None:
            task = self._loop.create_task(self._connect(connection))
            self._connected.add(task)
            task.add_done_callback(self._connected.discard)
        elif self._door.full:
            self._loop.remove_reader(self._listener)
            self._pause = self._loop.call_later(PAUSE_S, self._open)

    async def _connect(self, connection: socket.socket) -> None:
        """Serves a connection in this task: a task of asyncio's protocol would log a traceback when cancelled."""
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await self._loop.connect_accepted_socket(lambda: protocol, connection)
        await self._serve(reader, asyncio.StreamWriter(transport, protocol, reader, self._loop))


async def read_frames(reader: asyncio.StreamReader) -> Frames:
    """Yields the frames of a connection until it ends. Raises KVGrpcError for bytes that are no frame."""
    found = FrameReader(session_pb2.ClientFrame)
    while data := await reader.read(READ_BYTES):
        for frame in found.feed(data):
            check(frame)
            yield frame


def check_user(writer: asyncio.StreamWriter) -> None:
    """Raises PermissionDenied for a process of another user."""
    sock: socket.socket = writer.get_extra_info("socket")
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    if uid != os.getuid():
        raise PermissionDenied(Reason.NOT_OWNER, "only processes of this server's user may attach")


def hung_up(writer: asyncio.StreamWriter) -> bool:
    """Returns whether the other end is closed, even if this end has not read all: an engine that restarts must not be
    refused because of its old connection.
    """
    if writer.is_closing():
        return True
    poll = select.poll()
    poll.register(writer.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


def remove(path: str, file: File) -> None:
    """Removes the socket, unless the path is another server's by now."""
    with contextlib.suppress(OSError):
        if _file(path) == file:
            Path(path).unlink()


def _file(path: str) -> File:
    """Returns the file's identity. Raises OSError if there is none."""
    status = os.lstat(path)
    return status.st_dev, status.st_ino


def _make_room(path: str) -> None:
    """Removes the socket of a server that is gone. Raises InvalidRequest for anything else at the path."""
    try:
        status = os.lstat(path)
    except OSError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise invalid("session_socket", f"{path} is there, and is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            remove(path, (status.st_dev, status.st_ino))
            return
        except OSError as error:
            raise invalid("session_socket", f"{path} cannot be used: {error}") from error
    raise invalid("session_socket", f"another server listens at {path}")
