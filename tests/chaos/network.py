"""Network between leads that can be cut: a proxy before each lead, at the lead's advertised address. If the tests have
a network namespace of their own, the loopback device is cut instead, which also stops the bytes of NIXL over TCP.

A cut proxy swallows: connections stay, nothing comes through, and new ones are accepted but not served. After it is
mended everything continues where it stopped. This is the hardest case for both sides: old messages arrive late.
"""

import os
import selectors
import socket
import subprocess
import threading
from contextlib import suppress

CHUNK_BYTES = 64 * 1024
TURN_S = 0.05


NAMESPACE = "CHAOS_NAMESPACE" in os.environ
"""True if these tests have a network namespace of their own. `make chaos` gives them one where it may."""


def set_loopback(state: str) -> None:
    """Sets the loopback device "up" or "down". When it is down, only unix sockets work in this namespace."""
    subprocess.run(["ip", "link", "set", "lo", state], check=True)


class Proxy:
    """Forwards connections to `target` (host, port), which may be set later; it runs in a thread of its own."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.target = ("", 0)
        self._cut = threading.Event()
        self._end = threading.Event()
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._waiting: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        self._cut.set()

    def mend(self) -> None:
        self._cut.clear()

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        self._listener.close()
        for connection in (*self._pairs, *self._waiting):
            connection.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._end.is_set():
                if not self._cut.is_set():
                    for connection in self._waiting:
                        self._join(selector, connection)
                    self._waiting.clear()
                if self._cut.is_set():
                    self._end.wait(TURN_S)
                    continue
                for key, _ in selector.select(TURN_S):
                    one = key.fileobj
                    assert isinstance(one, socket.socket)
                    if one is self._listener:
                        self._waiting.append(self._listener.accept()[0])
                    elif one in self._pairs:
                        self._forward(selector, one)

    def _join(self, selector: selectors.BaseSelector, one: socket.socket) -> None:
        try:
            other = socket.create_connection(self.target, timeout=1.0)
        except OSError:  # nobody listens there: the caller is told by a closed connection
            one.close()
            return
        for here, there in ((one, other), (other, one)):
            here.settimeout(1.0)
            self._pairs[here] = there
            selector.register(here, selectors.EVENT_READ)

    def _forward(self, selector: selectors.BaseSelector, one: socket.socket) -> None:
        other = self._pairs[one]
        data = b""
        with suppress(OSError):
            data = one.recv(CHUNK_BYTES)
        with suppress(OSError):
            if data:
                other.sendall(data)
                return
        for connection in (one, other):
            del self._pairs[connection]
            selector.unregister(connection)
            connection.close()
