"""Connections to a server's port that send bytes instead of calls, and the frames of HTTP/2."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from tests.service.engines import Engine

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
EMPTY_SETTINGS = b"\0\0\0\4\0\0\0\0\0"


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    """Returns an HTTP/2 frame, whose length may be false."""
    said = len(payload) if length is None else length
    return said.to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


@contextmanager
def connected(engine: Engine) -> Iterator[socket.socket]:
    host, _, port = engine.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        yield connection


def send(connection: socket.socket, data: bytes) -> None:
    """Sends the data, or as much as the server takes, and waits until the server hangs up."""
    try:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass
    except TimeoutError:
        raise
    except OSError:  # the server hung up before the end
        pass
