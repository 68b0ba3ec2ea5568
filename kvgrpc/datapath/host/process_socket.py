"""The socket at which peers on this host ask a rank's process for a descriptor of its pool, or for a proof of identity.

There is one question and one answer, in one packet each (SOCK_SEQPACKET). A question has a token from the handshake, a
challenge of the peer's, and the number of the asking rank. The data path that minted the token answers, or gives the
reason why not. Each number is answered once, whoever asks under it. One thread serves all. The thread is blocked while
no client asks, drops clients that stay silent, keeps few of them at a time, and nothing that a client sends can stop
it.

The socket has an abstract name. An abstract name leaves nothing behind when the process is killed, no cleaner of
temporary files removes it, and the containers of one pod, which share a network but no files, find it. An abstract name
has no file permissions, but those would add nothing: both sides ask the kernel for the other's user and refuse a
foreign one. For peers in other network namespaces the process also listens in a folder, if one is given, at a file of
the same name (see `shared_folder`).
"""

import contextlib
import logging
import os
import secrets
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvgrpc.datapath.asker import credentials
from kvgrpc.datapath.base import DataPathUnavailable
from kvgrpc.datapath.own_user import is_own_user
from kvgrpc.datapath.questions import (
    ANSWERED,
    CHALLENGE_BYTES,
    RANK_BYTES,
    RANKS_MAX,
    REASON_BYTES_MAX,
    REFUSED,
    TOKEN_BYTES,
    Question,
)
from kvgrpc.datapath.shared_folder import SharedFolder, new_name
from kvgrpc.open_files import PAUSE_S, Door

_log = logging.getLogger(__name__)

TOKEN_TTL_S = 60.0
"""Time after the handshake in which a peer may ask, in seconds."""
TOKENS_OF_A_PEER = 4
"""Maximum number of tokens per peer and data path, for concurrent and repeated handshakes of one life."""
TOKENS_MAX = 4096
_UNNUMBERED = TOKEN_BYTES + CHALLENGE_BYTES
"""Length of a question without a rank's number. Older peers send it, and ranks with the asked rank's number."""
_CLIENTS_MAX = 16
_BACKLOG = 128
_CLIENT_S = 1.0
"""Time for a client to send its question, in seconds. A client has the question when it connects."""


@dataclass(frozen=True)
class SocketReply:
    """The answer to a peer."""

    payload: bytes = b""
    fds: tuple[int, ...] = ()
    """Descriptors to send and then close; at most DESCRIPTORS_MAX."""
    keeps: object = None
    """Object to keep for as long as the token would have been valid."""


Answerer = Callable[[bytes, int], SocketReply]
"""Answers a challenge of the process with that id (0: not visible). Raises OSError if it cannot."""


@dataclass(eq=False)
class _SocketToken:
    secret: bytes
    peer: str
    data_path: str
    ends: float
    answerer: Answerer
    asked: set[bytes] = field(default_factory=set)
    """Numbers of the ranks that have asked, as sent."""
    keeps: list[object] = field(default_factory=list)


class ProcessSocket:
    """Answers a token once under each rank number, until it expires. The first token opens the socket and starts the
    thread.
    """

    def __init__(self, folder: SharedFolder | None = None, token_ttl_s: float = TOKEN_TTL_S) -> None:
        self._folder = folder
        self._token_ttl_s = token_ttl_s
        self._lock = threading.Lock()  # guards the tokens
        self._tokens: dict[bytes, _SocketToken] = {}
        """Tokens by secret, the oldest first, which expires first."""
        self._by_peer: dict[str, list[_SocketToken]] = {}
        self._server: _Server | None = None
        self._closed = False

    def mint(self, peer: str, data_path: str, answerer: Answerer) -> tuple[str, bytes]:
        """Returns (name of the socket, token) for a question of each rank of that peer, in place of its oldest if there
        are many.

        Raises DataPathUnavailable if the socket cannot be made.
        """
        now = time.monotonic()
        with self._lock:
            if self._closed:
                raise DataPathUnavailable("the data path is closed")
            if self._server is None:
                try:
                    self._server = _Server(self._folder, self._answer)
                except OSError as error:
                    raise DataPathUnavailable(f"cannot make a socket for peers: {error}") from error
            self._make_room(peer, data_path, now)
            token = _SocketToken(secrets.token_bytes(TOKEN_BYTES), peer, data_path, now + self._token_ttl_s, answerer)
            self._tokens[token.secret] = token
            self._by_peer.setdefault(peer, []).append(token)
            return self._server.path, token.secret

    def question(self, path: str, token: bytes, descriptors: int = 1) -> Question:
        """Returns the question for a peer's socket, which is looked for where this one is."""
        return Question(path, token, descriptors=descriptors, folder=self._folder)

    def revoke(self, peer: str) -> None:
        with self._lock:
            for token in list(self._by_peer.get(peer, ())):
                self._drop(token)

    def close(self) -> None:
        """Ends the thread and removes the socket. Idempotent."""
        with self._lock:
            self._closed = True
            server, self._server = self._server, None
            self._tokens.clear()
            self._by_peer.clear()
        if server is not None:
            server.close()

    def _make_room(self, peer: str, data_path: str, now: float) -> None:
        same = [token for token in self._by_peer.get(peer, ()) if token.data_path == data_path]
        for token in same[: max(len(same) + 1 - TOKENS_OF_A_PEER, 0)]:
            self._drop(token)
        while self._tokens:
            oldest = next(iter(self._tokens.values()))
            if oldest.ends > now and len(self._tokens) < TOKENS_MAX:
                return
            self._drop(oldest)

    def _drop(self, token: _SocketToken) -> None:
        del self._tokens[token.secret]
        left = self._by_peer[token.peer]
        left.remove(token)
        if not left:
            del self._by_peer[token.peer]

    def _answer(self, question: bytes, pid: int) -> SocketReply | None:
        """Returns the reply to a question, or None for an invalid token."""
        secret, challenge, rank = question[:TOKEN_BYTES], question[TOKEN_BYTES:_UNNUMBERED], question[_UNNUMBERED:]
        numbered = len(rank) == RANK_BYTES and int.from_bytes(rank) < RANKS_MAX
        if len(challenge) != CHALLENGE_BYTES or (rank and not numbered):
            return None
        with self._lock:
            token = self._tokens.get(secret)
            if token is None or token.ends <= time.monotonic() or rank in token.asked:
                return None
            token.asked.add(rank)
        reply = token.answerer(challenge, pid)
        if reply.keeps is not None:
            token.keeps.append(reply.keeps)
        return reply


class _Server:
    """The socket, its file in the folder, and their thread. Raises OSError if the socket cannot be made."""

    def __init__(self, folder: SharedFolder | None, answer: Callable[[bytes, int], SocketReply | None]) -> None:
        self._answers = answer
        self._folder = folder
        self._name = new_name()
        self.path = f"@{self._name}"
        with contextlib.ExitStack() as undo:
            listeners = [undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))]
            listeners[0].bind(f"\0{self._name}")
            listeners[0].listen(_BACKLOG)
            if folder is not None:
                try:
                    listeners.append(undo.enter_context(folder.listen(self._name, _BACKLOG)))
                except OSError as error:
                    # Peers in this network namespace are still served.
                    _log.warning("peers in other network namespaces cannot ask this process: %s", error)
            for one in listeners:
                one.setblocking(False)
            undo.pop_all()
        self._doors = {one: Door(one, "peers that ask this process for its memory") for one in listeners}
        self._stop_read, self._stop_write = socket.socketpair()
        # The thread is a daemon, so that a program that forgets to close still ends.
        self._thread = threading.Thread(target=self._serve, name="kvgrpc-process", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop_write.close()
        self._thread.join()
        if self._folder is not None:
            self._folder.remove(self._name)
        for listener in self._doors:
            listener.close()
        self._stop_read.close()

    def _serve(self) -> None:
        with _Clients() as clients, selectors.DefaultSelector() as selector:
            for listener in self._doors:
                selector.register(listener, selectors.EVENT_READ)
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
                for listener, door in self._doors.items():
                    if listener in ready and (accepted := self._accept(door)) is not None:
                        clients.add(accepted)

    def _accept(self, door: Door) -> socket.socket | None:
        client = door.accept()
        if client is None:
            if door.full:
                # The client stays in the queue, so trying again at once would burn a core.
                stop = select.poll()
                stop.register(self._stop_read, select.POLLIN)
                stop.poll(PAUSE_S * 1_000)
            return None
        client.setblocking(False)
        if is_own_user(credentials(client)[1]):
            return client
        client.close()
        return None

    def _answer(self, client: socket.socket) -> None:
        """Handles one packet in and one packet out. A client that breaks off harms no other."""
        try:
            question = client.recv(_UNNUMBERED + RANK_BYTES + 1)
            if not question:
                return
            reply = self._answers(question, credentials(client)[0])
            if reply is None:
                client.send(REFUSED + b"the token is unknown, used or expired")
                return
            try:
                if reply.fds:
                    socket.send_fds(client, [ANSWERED + reply.payload], reply.fds)
                else:
                    client.send(ANSWERED + reply.payload)
            finally:
                for fd in reply.fds:
                    os.close(fd)
        except OSError as error:
            _log.debug("a peer that asked this process got no answer: %s", error)
            with contextlib.suppress(OSError):
                client.send(REFUSED + str(error).encode()[:REASON_BYTES_MAX])


class _Clients:
    """Clients that have not sent their question yet, each with a deadline, the oldest first."""

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
        """A descriptor that is readable while one of the clients is."""
        return self._poll.fileno()

    def wait_s(self) -> float | None:
        """Returns the time until the oldest client has been silent for too long; None if there is no client."""
        first = next(iter(self._deadlines.values()), None)
        return None if first is None else max(first - time.monotonic(), 0.0)

    def readable(self) -> list[socket.socket]:
        fds = {fd for fd, _ in self._poll.poll(0)}
        return [client for client in self._deadlines if client.fileno() in fds]

    def add(self, client: socket.socket) -> None:
        """Adds a client. If there are too many, the one that has been silent longest is dropped."""
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
