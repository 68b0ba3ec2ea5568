"""Frames of a session: a 4-byte big-endian length, then a message. There is no I/O: bytes in, messages out."""

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from kvgrpc.errors import InvalidRequest, OutOfRange, Reason

FRAME_BYTES_MAX = 64 * 1024 * 1024
"""Maximum bytes of a frame: a batch of calls. Each call in it is bounded by the service's own limits."""
_LENGTH = struct.Struct(">I")
_M = TypeVar("_M", bound=Message)
_T = TypeVar("_T")


def encode(message: Message) -> bytes:
    """Returns one frame. Raises OutOfRange (LIMIT_EXCEEDED) if it would be longer than any reader takes."""
    body = message.SerializeToString()
    if len(body) > FRAME_BYTES_MAX:
        raise OutOfRange(Reason.LIMIT_EXCEEDED, f"a frame of {len(body)} bytes; the limit is {FRAME_BYTES_MAX}")
    return _LENGTH.pack(len(body)) + body


def encode_rows(
    rows: Sequence[_T], make: Callable[[Sequence[_T]], Message], too_long: Callable[[_T, OutOfRange], None]
) -> Iterator[bytes]:
    """Yields one frame of all rows, or as few as it takes. A row that fits into no frame goes to `too_long` instead."""
    try:
        frame = encode(make(rows))
    except OutOfRange as error:
        if len(rows) == 1:
            too_long(rows[0], error)
            return
        half = len(rows) // 2
        yield from encode_rows(rows[:half], make, too_long)
        yield from encode_rows(rows[half:], make, too_long)
    else:
        yield frame


class FrameReader(Generic[_M]):
    """Cuts a stream of bytes into messages of one kind."""

    def __init__(self, kind: type[_M]) -> None:
        self._kind = kind
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[_M]:
        """Yields the messages that are complete. Messages that the caller does not take come with the next call.

        Raises OutOfRange or InvalidRequest for a malformed frame; nothing can be read after that.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > FRAME_BYTES_MAX:
                raise OutOfRange(Reason.LIMIT_EXCEEDED, f"a frame of {length} bytes; the limit is {FRAME_BYTES_MAX}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            try:
                message = self._kind.FromString(body)
            except DecodeError as error:
                raise InvalidRequest(Reason.INVALID_FIELD, "a frame does not hold the message expected") from error
            yield message
