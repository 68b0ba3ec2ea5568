"""A client of a lead's session socket that is no engine: it sends frames, or any bytes."""

import socket
from contextlib import suppress

from kvgrpc.core.values.layout import PoolKind
from kvgrpc.session.v1 import session_pb2
from kvgrpc.wire.description import pool_to_proto
from kvgrpc.wire.frames import FrameReader
from tests.engine.made import layout
from tests.engine.support import WAIT_S

ATTACH = session_pb2.ClientFrame(
    attach=session_pb2.AttachRequest(
        kind=pool_to_proto(layout(), PoolKind.ENGINE_MANAGED).kind,
        pool=pool_to_proto(layout(), PoolKind.ENGINE_MANAGED),
    )
)


class Client:
    """A connection that sends frames or arbitrary bytes."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(WAIT_S)
        self.socket.connect(path)
        self._reader = FrameReader(session_pb2.ServerFrame)
        self._frames: list[session_pb2.ServerFrame] = []

    def receive(self) -> session_pb2.ServerFrame:
        """Returns the next frame. Fails if the connection ends instead."""
        while not self._frames:
            data = self.socket.recv(1 << 16)
            assert data, "the connection ended"
            self._frames += self._reader.feed(data)
        return self._frames.pop(0)

    def rest(self) -> list[session_pb2.ServerFrame]:
        """Returns the server's remaining frames. Fails unless the server ends the connection."""
        # A reset means that the server left some of our bytes unread.
        with suppress(ConnectionResetError):
            while data := self.socket.recv(1 << 16):
                self._frames += self._reader.feed(data)
        return self._frames
