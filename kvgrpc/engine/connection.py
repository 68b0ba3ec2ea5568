"""The engine's end of a session socket: frames out, frames in, descriptors beside them."""

import os
import select
import socket
import time

from kvgrpc.errors import PreconditionFailed, Reason, Unavailable
from kvgrpc.session.v1 import session_pb2
from kvgrpc.wire.frames import FrameReader, encode
from kvgrpc.wire.values import core_reason

READ_BYTES = 256 * 1024
ATTACH_TIMEOUT_S = 30.0
"""Making and populating a large pool takes seconds."""


class Connection:
    """One connection to a lead."""

    def __init__(self, socket_path: str) -> None:
        """Raises Unavailable when no lead listens there."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(socket_path)
        except OSError as error:
            self._socket.close()
            raise Unavailable(Reason.PEER_UNREACHABLE, f"no lead listens at {socket_path}: {error.strerror}") from error
        self._frames = FrameReader(session_pb2.ServerFrame)
        self._ready: list[session_pb2.ServerFrame] = []
        self.closed = False

    def send(self, frame: session_pb2.ClientFrame) -> None:
        """Sends one frame; waits only while the lead does not read. Raises Unavailable when it is gone."""
        self._socket.setblocking(True)
        try:
            self._socket.sendall(encode(frame))
        except OSError as error:
            raise self._lost() from error

    def attach(self, frame: session_pb2.ClientFrame) -> tuple[session_pb2.ServerFrame, int]:
        """Sends the first frame and waits for its answer: (frame, descriptor or -1).

        Raises the lead's refusal as PreconditionFailed, Unavailable when it does not answer.
        """
        self.send(frame)
        deadline = time.monotonic() + ATTACH_TIMEOUT_S
        descriptor = -1
        while not self._ready:
            if not select.select([self._socket], [], [], max(deadline - time.monotonic(), 0.0))[0]:
                raise Unavailable(Reason.PEER_UNREACHABLE, "the lead did not answer the attach in time")
            data, descriptors, _, _ = socket.recv_fds(self._socket, READ_BYTES, 1)
            if descriptors:
                descriptor = descriptors[0]
            if not data:
                raise self._lost()
            self._ready += self._frames.feed(data)
        answer = self._ready.pop(0)
        if answer.HasField("refused"):
            if descriptor >= 0:
                os.close(descriptor)
            raise PreconditionFailed(core_reason(answer.refused.reason), answer.refused.message)
        return answer, descriptor

    def receive(self, timeout_s: float = 0.0) -> list[session_pb2.ServerFrame]:
        """The frames that are there, waiting up to `timeout_s` for the first. Raises Unavailable at the end."""
        frames, self._ready = self._ready, []
        wait_s = 0.0 if frames else timeout_s
        while select.select([self._socket], [], [], wait_s)[0]:
            wait_s = 0.0
            try:
                data = self._socket.recv(READ_BYTES)
            except OSError as error:
                raise self._lost() from error
            if not data:
                if frames:
                    break
                raise self._lost()
            frames += self._frames.feed(data)
        return frames

    def fileno(self) -> int:
        """For an event loop of the engine's own: readable when there are events."""
        return self._socket.fileno()

    def close(self) -> None:
        """Ends the connection: for a scheduler, the engine's life. Idempotent."""
        self.closed = True
        self._socket.close()

    def shutdown(self) -> None:
        """Wakes a thread that waits in `receive`, which then raises."""
        self.closed = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def _lost(self) -> Unavailable:
        return Unavailable(Reason.PEER_LOST, "the lead is gone; its leases and transfers are over")
