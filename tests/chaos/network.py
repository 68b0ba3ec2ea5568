"""A network between leads that can be cut: a proxy before each of them, at the address that it tells its peers; or, in
a network namespace of the tests' own, the loopback device, by which the bytes of NIXL over TCP go, too.

Cut, a proxy swallows: connections stay, nothing comes through, and new ones are taken and not served. As soon as it is
mended all goes on where it was, which is the hardest for both sides: what was sent long ago arrives.
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
"""Whether these tests have a network namespace of their own. `make chaos` gives them one where it may."""


def set_loopback(state: str) -> None:
    """ "up" or "down"; down, nothing in this namespace reaches anything but by unix sockets."""
    subprocess.run(["ip", "link", "set", "lo", state], check=True)


class Proxy:
    """Forwards connections to `target`, host and port, which may be set later; in a thread of its own."""

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
        except OSError:  # nobody is there: so it is told
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
