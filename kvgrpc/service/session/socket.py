"""The unix socket of the sessions: made, checked and removed, and the frames that come over its connections."""

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
from kvgrpc.session.v1 import session_pb2
from kvgrpc.wire.fields import check
from kvgrpc.wire.frames import FrameReader

READ_BYTES = 256 * 1024
PROBE_TIMEOUT_S = 1.0

Frames = AsyncIterator[session_pb2.ClientFrame]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


File = tuple[int, int]
"""A socket's file: device and inode. Its path may be another server's by now."""


async def listen(path: str, serve: Serve) -> tuple[asyncio.Server, File]:
    """Listens; the socket is the user's alone. Raises InvalidRequest when the path cannot be used."""
    _make_room(path)
    listener = socket.socket(socket.AF_UNIX)
    try:
        # Bound here: asyncio would remove a socket that another server has bound meanwhile.
        listener.bind(path)
        os.chmod(path, 0o600)  # noqa: PTH101 - one system call
        file = _file(path)
        return await asyncio.start_unix_server(serve, sock=listener), file
    except (OSError, ValueError) as error:
        listener.close()
        raise invalid("session_socket", f"{path} cannot be bound: {error}") from error


async def read_frames(reader: asyncio.StreamReader) -> Frames:
    """The frames of a connection, until it ends. Raises KVGrpcError for what is none."""
    found = FrameReader(session_pb2.ClientFrame)
    while data := await reader.read(READ_BYTES):
        for frame in found.feed(data):
            check(frame)
            yield frame


def check_user(writer: asyncio.StreamWriter) -> None:
    """Only this user's processes may attach. Raises PermissionDenied."""
    sock: socket.socket = writer.get_extra_info("socket")
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    if uid != os.getuid():
        raise PermissionDenied(Reason.NOT_OWNER, "only processes of this server's user may attach")


def hung_up(writer: asyncio.StreamWriter) -> bool:
    """Whether the other end is closed, also while this end has not read all: an engine that restarts is not refused
    because of itself.
    """
    if writer.is_closing():
        return True
    poll = select.poll()
    poll.register(writer.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


def remove(path: str, file: File) -> None:
    """Removes the socket, unless the path is another one's by now."""
    with contextlib.suppress(OSError):
        if _file(path) == file:
            Path(path).unlink()


def _file(path: str) -> File:
    """Raises OSError when there is none."""
    status = os.lstat(path)
    return status.st_dev, status.st_ino


def _make_room(path: str) -> None:
    """Removes the socket of a server that is gone. Raises InvalidRequest for anything else that is there."""
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
