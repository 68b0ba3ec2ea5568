"""Connections to a server's port that send bytes instead of calls, and the frames of HTTP/2."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from tests.service.engines import Engine

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
EMPTY_SETTINGS = b"\0\0\0\4\0\0\0\0\0"


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    """An HTTP/2 frame, whose length may lie."""
    said = len(payload) if length is None else length
    return said.to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


@contextmanager
def connected(engine: Engine) -> Iterator[socket.socket]:
    host, _, port = engine.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        yield connection


def send(connection: socket.socket, data: bytes) -> None:
    """All of it, or as much as the server wanted, until it hangs up."""
    try:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass
    except TimeoutError:
        raise
    except OSError:  # it did not wait for the end
        pass
