"""Asks processes of peers on this host from one thread, so that a slow one delays no other.

Nothing here blocks except the wait for all of them. A unix socket with a full queue cannot be waited for, so it is
tried again. The number of concurrent questions is limited; while others wait, the oldest one is given less time.
"""

import array
import contextlib
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

from kvgrpc.datapath.own_user import is_own_user
from kvgrpc.datapath.questions import (
    ANSWERED,
    PAYLOAD_BYTES_MAX,
    RANK_BYTES,
    REASON_BYTES_MAX,
    REFUSED,
    TOKEN_BYTES,
    Answer,
    ProcessEnd,
    Question,
)
from kvgrpc.datapath.shared_folder import elsewhere, place_of

ANSWER_S = 2.0
"""Maximum wait for an answer, in seconds."""
FAIR_S = 0.25
"""Maximum wait for an answer while other questions wait for their turn, in seconds."""
AT_ONCE = 128
_CONNECT_AGAIN_S = 0.02
_PATH_BYTES_MAX = 107  # sun_path of <linux/un.h>, with its end
_PEERCRED = struct.Struct("=iII")  # pid, uid, gid
_SO_PEERPIDFD = 77  # <asm-generic/socket.h>, since Linux 6.5


class PendingQuestion:
    """One question, until it is answered or given up."""

    def __init__(self, question: Question, answered: Callable[[Answer | str], None], rank: int | None) -> None:
        self.question = question
        named = b"" if rank is None else rank.to_bytes(RANK_BYTES)
        self.packet = question.token[:TOKEN_BYTES].ljust(TOKEN_BYTES, b"\0") + question.challenge + named
        self.answered = answered
        self.cancelled = False
        self.began = 0.0
        self.socket: socket.socket | None = None
        self.connected = False
        self.pid = 0
        self.end: ProcessEnd | None = None

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
        if self.end is not None:
            self.end.close()


class Asker:
    """Asks the questions of `ask`, in a thread that the first call starts."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()  # guards what callers change, and whether a question is cancelled
        self._waiting: deque[PendingQuestion] = deque()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        # Only the thread uses what follows.
        self._under_way: dict[PendingQuestion, None] = {}
        """Questions in flight, the oldest first."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ)

    def ask(
        self, question: Question, answered: Callable[[Answer | str], None], rank: int | None = None
    ) -> PendingQuestion:
        """Queues a question. Another thread calls `answered` with the answer, which `answered` closes, or with the
        reason why there is none; `answered` must not block. `rank` is the number of the asking rank, below RANKS_MAX;
        None means the number of the rank that is asked.
        """
        pending = PendingQuestion(question, answered, rank)
        with self._lock:
            if self._closed:
                answered("this rank is closing")
                return pending
            self._waiting.append(pending)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        self._wake()
        return pending

    def cancel(self, pending: PendingQuestion) -> None:
        """Cancels a question: `answered` is not called any more."""
        with self._lock:
            pending.cancelled = True
            with contextlib.suppress(ValueError):
                self._waiting.remove(pending)
        self._wake()

    def close(self) -> None:
        """Gives up all questions without calling `answered`. Idempotent."""
        with self._lock:
            self._closed = True
        self._wake()
        if self._thread is not None:
            self._thread.join()
        for pending in self._under_way:
            pending.close()
        self._under_way.clear()
        self._waiting.clear()
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # a full socket wakes the thread anyway
            self._wake_write.send(b"\0")

    # ---- the thread

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(self._wait_s()):
                if key.data is None:
                    with contextlib.suppress(OSError):
                        self._wake_read.recv(1 << 16)
                elif key.data in self._under_way:
                    self._receive(key.data)
            now = time.monotonic()
            for pending in [pending for pending in self._under_way if pending.cancelled]:
                self._end(pending)
            while self._expire_first(now, ANSWER_S):
                pass
            for pending in [pending for pending in self._under_way if not pending.connected]:
                self._connect(pending)
            self._begin_waiting(now)

    def _wait_s(self) -> float | None:
        oldest = next(iter(self._under_way), None)
        if oldest is None:
            return None
        if any(not pending.connected for pending in self._under_way):
            return _CONNECT_AGAIN_S
        return max(oldest.began + (FAIR_S if self._waiting else ANSWER_S) - time.monotonic(), 0.0)

    def _begin_waiting(self, now: float) -> None:
        while self._waiting:
            if len(self._under_way) >= AT_ONCE and not self._expire_first(now, FAIR_S):
                return
            with self._lock:
                if not self._waiting:
                    return
                pending = self._waiting.popleft()
            pending.began = now
            self._under_way[pending] = None
            self._connect(pending)

    def _expire_first(self, now: float, patience_s: float) -> bool:
        """Gives up the oldest question if it is at least `patience_s` old. Returns True if it did."""
        pending = next(iter(self._under_way), None)
        if pending is None or now - pending.began < patience_s:
            return False
        self._tell(pending, f"no answer at {pending.question.socket_path!r} within {patience_s:g} s")
        return True

    def _connect(self, pending: PendingQuestion) -> None:
        question = pending.question
        try:
            if pending.socket is None:
                pending.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                pending.socket.setblocking(False)
            with place_of(name_of(question.socket_path), question.folder) as place:
                pending.socket.connect(place)
        except BlockingIOError:
            return  # the listener's queue is full
        except (OSError, ValueError) as error:
            shown = question.socket_path[:_PATH_BYTES_MAX]
            lacks = elsewhere(question.folder) if isinstance(error, ConnectionRefusedError) else ""
            self._tell(pending, f"{shown!r} cannot be reached from here: {error}{lacks}")
            return
        pending.connected = True
        # The process is checked and held before anything is sent: a peer may have named another process's socket. A
        # process that answers a question asked after it was held was there all the time.
        pending.pid, uid, pending.end = listener(pending.socket)
        if not is_own_user(uid):
            self._tell(pending, f"the peer runs as user {uid}, this process as another")
            return
        try:
            pending.socket.send(pending.packet)
        except OSError as error:
            self._tell(pending, f"{question.socket_path!r} takes no question: {error}")
            return
        self._selector.register(pending.socket, selectors.EVENT_READ, pending)

    def _receive(self, pending: PendingQuestion) -> None:
        assert pending.socket is not None
        try:
            payload, fds = _receive(pending.socket, pending.question.descriptors)
        except (OSError, ValueError) as error:
            self._tell(pending, str(error))
            return
        end, pending.end = pending.end, None
        self._tell(pending, Answer(pending.question, pending.pid, end, payload, fds))

    def _tell(self, pending: PendingQuestion, outcome: Answer | str) -> None:
        self._end(pending)
        with self._lock:
            if not pending.cancelled and not self._closed:
                pending.answered(outcome)
                return
        if isinstance(outcome, Answer):
            outcome.close()

    def _end(self, pending: PendingQuestion) -> None:
        del self._under_way[pending]
        if pending.connected and pending.socket is not None:
            with contextlib.suppress(KeyError):  # it ended before it was asked
                self._selector.unregister(pending.socket)
        pending.close()


def name_of(path: str) -> str:
    """Returns the name of a socket as a peer states it, without the `@` that begins it. Raises ValueError for all else:
    a path may lead anywhere.
    """
    if not path.startswith("@") or not 1 < len(path.encode()) <= _PATH_BYTES_MAX:
        raise ValueError("this names no socket")
    return path[1:]


def credentials(connected: socket.socket) -> tuple[int, int]:
    """Returns (pid, uid) of the process at the other end, as of a client's connect() or a server's listen()."""
    pid, uid, _ = _PEERCRED.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))
    return pid, uid


def listener(connected: socket.socket) -> tuple[int, int, ProcessEnd | None]:
    """Returns (pid, uid, end) of the process that listens at the other end; 0 and None if it is not seen from here."""
    pid, uid = credentials(connected)
    if not pid:
        return 0, uid, None
    try:
        return pid, uid, ProcessEnd(connected.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    except OSError:
        pass  # an older kernel; or the process is gone, and then its number may be another's: see `process.prove`
    try:
        return pid, uid, ProcessEnd(os.pidfd_open(pid))
    except OSError:
        return pid, uid, None


def _receive(connected: socket.socket, most: int) -> tuple[bytes, tuple[int, ...]]:
    """Returns (payload, at most `most` descriptors). Raises ValueError for a refusal and for any other reply."""
    fds = array.array("i")
    room = socket.CMSG_SPACE(most * fds.itemsize)
    size = 1 + max(REASON_BYTES_MAX, PAYLOAD_BYTES_MAX)
    answer, messages, flags, _ = connected.recvmsg(size, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, payload in messages:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    all_came = len(fds) <= most and not flags & socket.MSG_CTRUNC
    if answer[:1] == ANSWERED and all_came and len(answer) <= 1 + PAYLOAD_BYTES_MAX:
        return answer[1:], tuple(fds)
    for fd in fds:  # alignment may leave room for one descriptor too many
        os.close(fd)
    if answer[:1] == REFUSED:
        raise ValueError(f"the peer refused: {answer[1:].decode(errors='replace')}")
    if not all_came:
        raise ValueError(f"not all of the peer's descriptors came: more than {most}, or than this process may open")
    raise ValueError("the peer answered with something else than it was asked for")
