"""The engine's end of a session socket: frames out, frames in, descriptors beside them.

Every wait has a deadline, except `receive(None)`. A forked child closes the sockets that it inherits: a copy would keep
a session alive beyond the end of its engine.
"""

import math
import os
import select
import socket
import struct
import time
import weakref

from kvgrpc.errors import KVGrpcError, Reason, Unavailable
from kvgrpc.open_files import received_with_descriptor
from kvgrpc.session.v1 import session_pb2
from kvgrpc.wire.frames import FrameReader
from kvgrpc.wire.values import stated_error

READ_BYTES = 256 * 1024
ATTACH_TIMEOUT_S = 30.0
"""Timeout for the answer to an attach, in seconds: making and populating a large pool takes several."""
SEND_TIMEOUT_S = 10.0
"""Timeout for a send, in seconds. A lead reads at once: one that has not read for this long is stopped or dead."""


class LeadDied(Unavailable):
    """The session ended unasked, and no other lead takes over: the lead or a worker is gone, with every lease and
    transfer.

    No event follows. See `Engine` for what becomes of the memory.
    """


class SessionOver(LeadDied):
    """The lead lives, and says that this engine's life is over: a worker or the scheduler is gone."""


class LeadConnection:
    """One connection to a lead. One thread may send while another receives."""

    def __init__(self, lead: str | socket.socket) -> None:
        """Connects to `lead`, a socket's path, or takes a connected socket. Raises Unavailable if none listens."""
        self._socket = _connected(lead) if isinstance(lead, str) else lead
        self._socket.settimeout(SEND_TIMEOUT_S)
        self._readable = select.poll()
        self._readable.register(self._socket, select.POLLIN)
        self._frames = FrameReader(session_pb2.ServerFrame)
        self._ready: list[session_pb2.ServerFrame] = []
        self._descriptors: list[int] = []
        """Descriptors that came with the answer to the attach."""
        self.closed = False
        _open.add(self)

    def send(self, frame: bytes) -> None:
        """Sends one frame; waits only while the lead does not read. Raises LeadDied when the lead is gone."""
        try:
            self._socket.sendall(frame)
        except OSError as error:
            # A part of the frame may be sent: no other frame can follow.
            self.shutdown()
            raise _lost() from error

    def attach(
        self, frame: bytes, memory: int = -1, timeout_s: float | None = None
    ) -> tuple[session_pb2.ServerFrame, int]:
        """Sends the first frame and waits for its answer: (frame, descriptor or -1).

        `memory`: descriptor of the shared memory of a worker that comes back. Raises the lead's refusal, and
        Unavailable when the lead does not answer; the connection is closed then.
        """
        try:
            self.send(frame)
            deadline = time.monotonic() + (ATTACH_TIMEOUT_S if timeout_s is None else timeout_s)
            while (answer := self.answer(deadline - time.monotonic())) is not None:
                if not answer[0].HasField("memory_wanted"):
                    return answer
                _give(memory, answer[1])
            raise Unavailable(Reason.DEADLINE, "the lead did not answer the attach in time")
        except KVGrpcError:
            self.close()
            raise

    def answer(self, timeout_s: float) -> tuple[session_pb2.ServerFrame, int] | None:
        """Returns the lead's answer to the attach; None when it does not come in time. Raises the lead's refusal."""
        deadline = time.monotonic() + timeout_s
        while not self._ready:
            if not self._wait(deadline - time.monotonic()):
                return None
            self._ready += self._read(passing=True)
        answer = self._ready.pop(0)
        if answer.HasField("refused"):
            raise stated_error(answer.refused.code, answer.refused.reason, answer.refused.message)
        if answer.HasField("over"):
            raise SessionOver(Reason.PEER_LOST, answer.over.message)
        return answer, self._descriptors.pop(0) if self._descriptors else -1

    def receive(self, timeout_s: float | None = 0.0) -> list[session_pb2.ServerFrame]:
        """Returns the frames that are there, waiting up to `timeout_s` for the first (None: as long as it takes).

        Raises LeadDied at the end of the session, once all frames before it were taken.
        """
        frames, self._ready = self._ready, []
        wait_s = 0.0 if frames else timeout_s
        while self._wait(wait_s):
            wait_s = 0.0
            try:
                frames += self._read()
            except LeadDied:
                if not frames:
                    raise
                break
        return frames

    def fileno(self) -> int:
        """Returns a descriptor for an event loop, readable when there is something to receive."""
        return self._socket.fileno()

    @property
    def lead_pid(self) -> int:
        """Id of the process at the other end."""
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid: int = struct.unpack("3i", credentials)[0]
        return pid

    def close(self) -> None:
        """Ends the connection; for a scheduler this ends the engine's life. Idempotent."""
        self.closed = True
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.pop())

    def shutdown(self) -> None:
        """Ends the connection, and wakes a thread that waits in `receive`, which then raises. `close` must follow."""
        self.closed = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def _wait(self, timeout_s: float | None) -> bool:
        """Waits for input or the end; returns whether it came. Not by select(): that takes no descriptor above 1023."""
        if self.fileno() < 0:
            raise _lost()
        return bool(self._readable.poll(None if timeout_s is None else math.ceil(max(timeout_s, 0.0) * 1000)))

    def _read(self, *, passing: bool = False) -> list[session_pb2.ServerFrame]:
        """Returns the frames of one read. `passing`: keeps a descriptor beside them, which no child inherits."""
        try:
            if passing:
                data, received = received_with_descriptor(self._socket, READ_BYTES)
                self._descriptors += received
            else:
                data = self._socket.recv(READ_BYTES)
        except OSError as error:
            raise _lost() from error
        if not data:
            raise _lost()
        return list(self._frames.feed(data))


def _connected(socket_path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.connect(socket_path)
    except OSError as error:
        made.close()
        said = error.strerror or str(error)
        raise Unavailable(Reason.PEER_UNREACHABLE, f"no lead listens at {socket_path}: {said}") from error
    return made


_open: "weakref.WeakSet[LeadConnection]" = weakref.WeakSet()


def _let_go() -> None:
    for connection in list(_open):
        connection.close()


os.register_at_fork(after_in_child=_let_go)


def _give(memory: int, to: int) -> None:
    """Sends a descriptor into the socket that the lead passed for it."""
    if to < 0:
        raise _lost()
    with socket.socket(fileno=to) as lead:
        try:
            socket.send_fds(lead, [b"."], [memory])
        except OSError as error:
            raise _lost() from error


def _lost() -> LeadDied:
    return LeadDied(Reason.PEER_LOST, "the session is over: the lead, or a worker of this engine, is gone")
