"""HTTP/2 as a load generator needs it: calls are bytes made in advance, and answers are counted without being parsed.

A generator in Python that used gRPC would be no faster than the server that it is to overload.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
HEAD_BYTES = 9
WINDOW_BYTES = 0x7FFF0000
"""Window for answers, of a stream and of a connection."""
FIRST_WINDOW_BYTES = 65_535
"""Window for requests that a connection has at its beginning."""
STREAMS_SETTING, WINDOW_SETTING, TABLE_SETTING, BINARY_SETTING = 3, 4, 1, 0xFE03
_STATUS = re.compile(rb"grpc-status(.)(\d+)", re.DOTALL)
_REASON = re.compile(rb"kvgrpc-reason.([A-Z_]+)|\x0a.([A-Z][A-Z_]{3,40})\x12", re.DOTALL)


class Frame(NamedTuple):
    """One frame."""

    kind: int
    flags: int
    stream: int
    payload: bytes


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Returns the bytes of a frame."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def greeting() -> bytes:
    """Returns what a client says first. The server may then use no table of headers, and sends bytes as they are."""
    settings = ((TABLE_SETTING, 0), (WINDOW_SETTING, WINDOW_BYTES), (BINARY_SETTING, 1))
    said = b"".join(name.to_bytes(2, "big") + value.to_bytes(4, "big") for name, value in settings)
    window = frame(WINDOW_UPDATE, 0, 0, (WINDOW_BYTES - FIRST_WINDOW_BYTES).to_bytes(4, "big"))
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, said) + window


def head(path: str, authority: str, *, tls: bool, timeout_s: int) -> bytes:
    """Returns the block of headers of a call."""
    rows = (("te", "trailers"), ("content-type", "application/grpc"), ("grpc-timeout", f"{timeout_s}S"))
    block = bytes([0x83, 0x87 if tls else 0x86]) + b"\x04" + _text(path) + b"\x01" + _text(authority)
    return block + b"".join(b"\x00" + _text(name) + _text(value) for name, value in rows)


def _text(value: str) -> bytes:
    assert len(value) < 127
    return bytes([len(value)]) + value.encode()


def call(stream: int, block: bytes, body: bytes) -> bytes:
    """Returns the bytes of a call with one request."""
    message = b"\0" + len(body).to_bytes(4, "big") + body
    return frame(HEADERS, END_HEADERS, stream, block) + frame(DATA, END_STREAM, stream, message)


def frames(buffer: bytearray) -> Iterator[Frame]:
    """Takes all whole frames out of a buffer."""
    at, end = 0, len(buffer)
    while end - at >= HEAD_BYTES:
        size = buffer[at] << 16 | buffer[at + 1] << 8 | buffer[at + 2]
        if end - at - HEAD_BYTES < size:
            break
        stream = int.from_bytes(buffer[at + 5 : at + 9], "big")
        yield Frame(buffer[at + 3], buffer[at + 4], stream, bytes(buffer[at + 9 : at + 9 + size]))
        at += HEAD_BYTES + size
    del buffer[:at]


def streams_of(settings: bytes) -> int:
    """Returns the number of streams that the server's settings allow a connection; 0 if they do not say it."""
    rows = (settings[at : at + 6] for at in range(0, len(settings), 6))
    return next((int.from_bytes(row[2:]) for row in rows if int.from_bytes(row[:2]) == STREAMS_SETTING), 0)


def status_of(trailers: bytes) -> tuple[int, str]:
    """Returns the status and the reason of an answer's last headers; the reason is empty if there is none."""
    found = _STATUS.search(trailers)
    status = int(found[2][: found[1][0] & 0x7F]) if found else -1
    if status <= 0:
        return status, ""
    reason = _REASON.search(trailers)
    return status, (reason[1] or reason[2]).decode() if reason else ""
