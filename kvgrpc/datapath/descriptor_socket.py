"""Hands read-only descriptors of a pool to peers on this host, over a unix socket.

One request, one answer, one packet each (SOCK_SEQPACKET): a token, and for it a descriptor or the
reason why not. One thread serves all: it is blocked while nobody asks, drops clients that stay
silent, keeps few of them at a time, and nothing that a client sends can stop it.

The socket has an abstract name unless a folder is given. An abstract name leaves nothing behind when
the process is killed, no cleaner of temporary files removes it, and the containers of one pod, which
share a network but no files, find it. It has no file permissions, but those would add nothing: both
sides ask the kernel for the other's user and refuse a foreign one. Hosts where peers share a folder
but not a network namespace give the folder.
"""

import array
import contextlib
import errno
import logging
import os
import secrets
import select
import selectors
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvgrpc.datapath.base import DataPathUnavailable
from kvgrpc.datapath.process import ProcessEnd

_log = logging.getLogger(__name__)

TOKEN_BYTES = 32
_TOKENS_MAX = 4096
_CLIENTS_MAX = 16
_BACKLOG = 128
_CLIENT_S = 1.0
"""How long a client may take to send its token; it has it when it connects."""
_GRANTED, _REFUSED = b"\0", b"\1"
_REASON_BYTES_MAX = 200
_PEERCRED = struct.Struct("3i")  # pid, uid, gid


class DescriptorServer:
    """Gives one descriptor for each token, once, until the token expires.

    `reopen` makes a new descriptor, which the server closes after it was sent. Raises OSError when
    the socket cannot be made.
    """

    def __init__(self, reopen: Callable[[], int], token_ttl_s: float, folder: Path | None = None) -> None:
        self._reopen = reopen
        self._token_ttl_s = token_ttl_s
        self._tokens: dict[bytes, float] = {}
        self._lock = threading.Lock()  # guards the tokens
        self._folder = None if folder is None else Path(tempfile.mkdtemp(prefix="shm", dir=folder))
        if self._folder is None:
            self.path = f"@kvgrpc-{secrets.token_hex(16)}"
        else:
            self.path = str(self._folder / "socket")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(_address(self.path))
        self._listener.listen(_BACKLOG)
        self._stop_read, self._stop_write = socket.socketpair()
        # Daemon, so that a program that forgets to close still ends.
        self._thread = threading.Thread(target=self._serve, name="kvgrpc-shm-fds", daemon=True)

    def start(self) -> None:
        """Begins to answer."""
        self._thread.start()

    def mint(self) -> bytes:
        """A token for one descriptor. Raises DataPathUnavailable when too many wait for their use."""
        now = time.monotonic()
        with self._lock:
            self._tokens = {token: end for token, end in self._tokens.items() if end > now}
            if len(self._tokens) >= _TOKENS_MAX:
                raise DataPathUnavailable(f"{_TOKENS_MAX} peers have not yet fetched their pool")
            token = secrets.token_bytes(TOKEN_BYTES)
            self._tokens[token] = now + self._token_ttl_s
        return token

    def close(self) -> None:
        """Ends the thread and removes the socket. Idempotent."""
        self._stop_write.close()
        if self._thread.ident is not None:
            self._thread.join()
        self._listener.close()
        self._stop_read.close()
        if self._folder is not None:
            with contextlib.suppress(OSError):
                Path(self.path).unlink()
                self._folder.rmdir()

    def _redeem(self, token: bytes) -> bool:
        with self._lock:
            return self._tokens.pop(token, 0.0) > time.monotonic()

    def _serve(self) -> None:
        with _Clients() as clients, selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._stop_read, selectors.EVENT_READ)
            selector.register(clients.ready, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select(clients.wait_s())}
                if self._stop_read in ready:
                    return
                for client in clients.readable():
                    self._answer(client)
                    clients.drop(client)
                clients.drop_silent()
                if self._listener in ready and (accepted := self._accept()) is not None:
                    clients.add(accepted)

    def _accept(self) -> socket.socket | None:
        try:
            client, _ = self._listener.accept()
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}:
                # The client stays in the queue, so that trying again at once would burn a core.
                _log.warning("cannot accept a peer that wants to map the pool: %s", error)
                stop = select.poll()
                stop.register(self._stop_read, select.POLLIN)
                stop.poll(100)
            return None
        client.setblocking(False)
        if peer_uid(client) == os.geteuid():
            return client
        client.close()
        return None

    def _answer(self, client: socket.socket) -> None:
        """One packet in, one packet out; a client that breaks off harms nobody else."""
        try:
            token = client.recv(TOKEN_BYTES + 1)
            if not token:
                return
            if not self._redeem(token):
                client.send(_REFUSED + b"the token is unknown, used or expired")
                return
            fd = self._reopen()
            try:
                socket.send_fds(client, [_GRANTED], [fd])
            finally:
                os.close(fd)
        except OSError as error:
            _log.debug("a peer that wanted to map the pool did not get it: %s", error)
            with contextlib.suppress(OSError):
                client.send(_REFUSED + str(error).encode()[:_REASON_BYTES_MAX])


class _Clients:
    """Those who connected and have not sent their token yet, each with a deadline, oldest first."""

    def __init__(self) -> None:
        self._deadlines: dict[socket.socket, float] = {}
        self._poll = select.epoll()

    def __enter__(self) -> "_Clients":
        return self

    def __exit__(self, *_: object) -> None:
        for client in list(self._deadlines):
            self.drop(client)
        self._poll.close()

    @property
    def ready(self) -> int:
        """A descriptor that is readable while one of them is."""
        return self._poll.fileno()

    def wait_s(self) -> float | None:
        """Until the oldest has been silent for too long; None when there is nobody."""
        first = next(iter(self._deadlines.values()), None)
        return None if first is None else max(first - time.monotonic(), 0.0)

    def readable(self) -> list[socket.socket]:
        fds = {fd for fd, _ in self._poll.poll(0)}
        return [client for client in self._deadlines if client.fileno() in fds]

    def add(self, client: socket.socket) -> None:
        """Takes it in; the one that has been silent longest makes room for it."""
        if len(self._deadlines) == _CLIENTS_MAX:
            self.drop(next(iter(self._deadlines)))
        self._deadlines[client] = time.monotonic() + _CLIENT_S
        self._poll.register(client, select.EPOLLIN)

    def drop(self, client: socket.socket) -> None:
        self._poll.unregister(client)
        client.close()
        del self._deadlines[client]

    def drop_silent(self) -> None:
        now = time.monotonic()
        for client in [c for c, deadline in self._deadlines.items() if deadline <= now]:
            self.drop(client)


def fetch_descriptor(path: str, token: bytes, timeout_s: float) -> tuple[int, ProcessEnd | None]:
    """The descriptor that the peer's server gives for `token`, and the peer's process, where its end can be seen; the
    caller closes both.

    Raises DataPathUnavailable, at the latest after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            # Not settimeout: a socket with a timeout does not wait for room in the server's queue.
            _set_timeout(client, socket.SO_SNDTIMEO, timeout_s)
            client.connect(_address(path))
            # Asked before anything is sent: a peer may have named somebody else's socket.
            if (uid := peer_uid(client)) != os.geteuid():
                raise DataPathUnavailable(f"the peer runs as user {uid}, this process as another")
            # Held before it is asked: whoever answers then was there all the time, so the number is not another's.
            process = _peer_process(client)
            client.send(token)
            _set_timeout(client, socket.SO_RCVTIMEO, max(deadline - time.monotonic(), 0.001))
            return _receive(client), process
    except BlockingIOError as error:
        raise DataPathUnavailable(f"no answer at {path} within {timeout_s:g} s") from error
    except (OSError, ValueError) as error:
        raise DataPathUnavailable(f"{path} cannot be reached from here: {error}") from error


def _receive(client: socket.socket) -> int:
    fds = array.array("i")
    room = socket.CMSG_SPACE(fds.itemsize)
    answer, messages, _, _ = client.recvmsg(1 + _REASON_BYTES_MAX, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, payload in messages:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if answer == _GRANTED and len(fds) == 1:
        return fds[0]
    for fd in fds:  # the room is for one, yet alignment may leave space for a second
        os.close(fd)
    if answer[:1] == _REFUSED:
        raise DataPathUnavailable(f"the peer refused: {answer[1:].decode(errors='replace')}")
    raise DataPathUnavailable("the peer answered with something else than a descriptor")


def peer_uid(connected: socket.socket) -> int:
    """User of the process at the other end, as the kernel saw it when the two connected."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    uid: int = _PEERCRED.unpack(credentials)[1]
    return uid


def _peer_process(connected: socket.socket) -> ProcessEnd | None:
    """The process that listens at the other end; None where this process does not see it."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    pid: int = _PEERCRED.unpack(credentials)[0]
    try:
        return ProcessEnd(os.pidfd_open(pid)) if pid else None
    except OSError:
        return None


def _set_timeout(client: socket.socket, option: int, timeout_s: float) -> None:
    seconds, rest = divmod(timeout_s, 1)
    timeval = struct.pack("@ll", int(seconds), int(rest * 1e6))
    client.setsockopt(socket.SOL_SOCKET, option, timeval)


def _address(path: str) -> str:
    return "\0" + path[1:] if path.startswith("@") else path
