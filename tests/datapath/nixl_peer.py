"""A second process for tests of data path `nixl`: it offers memory and makes progress for its readers.

    with NixlPeer((1 << 20,)) as peer:
        remote = path.connect(peer.endpoint)
        ...
        peer.memory  # what its bytes are

It is a process of its own and not a fork: UCX reads its environment once, when it is loaded.
"""

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parents[2]
POLL_S = float(os.environ.get("PS","0.0002"))
ANSWER_S = 20.0


def pattern(nbytes: int) -> NDArray[np.uint8]:
    """What a peer's memory holds; no two blocks of it are alike."""
    return np.random.default_rng(nbytes).integers(1, 256, nbytes, dtype=np.uint8)


class NixlPeer:
    """The process, seen from the test. `sizes` are the bytes of its segments, `env` is put over the test's."""

    def __init__(self, sizes: tuple[int, ...], env: dict[str, str] | None = None) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(ANSWER_S)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), ",".join(map(str, sizes))]
            search_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
            environment = {**os.environ, **(env or {}), "PYTHONPATH": search_path}
            self.process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        self.memory = np.concatenate([pattern(size) for size in sizes])
        self.endpoint = receive(self._socket)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self._socket.close()  # it ends when it can read no more
        try:
            self.process.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def ask(self, command: str) -> Any:  # noqa: ANN401
        """Runs one of the functions of `Service` there and returns what it returns."""
        send(self._socket, command)
        return receive(self._socket)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


class Service:
    """The process, seen from itself."""

    def __init__(self, channel: socket.socket, sizes: tuple[int, ...]) -> None:
        from kvgrpc.core.endpoints import RankEndpoint
        from kvgrpc.datapath.memory import PrivateMemory
        from kvgrpc.datapath.nixl import NixlPath

        self._channel = channel
        self._buffers = [pattern(size) for size in sizes]
        self._path = NixlPath(PrivateMemory.of(*self._buffers), "peer")
        self._polls = True
        send(channel, self._path.offer(RankEndpoint(7)))

    def run(self) -> None:
        """Ends when the other side closes the channel."""
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                if select.select([self._channel], [], [], POLL_S if self._polls else None)[0]:
                    send(self._channel, getattr(self, receive(self._channel))())
                if self._polls:
                    self._path.progress()
        self._path.close()

    def stop_polling(self) -> None:
        self._polls = False

    def poll(self) -> None:
        self._polls = True

    def close(self) -> None:
        self._path.close()


def send(channel: socket.socket, value: object) -> None:
    data = pickle.dumps(value)
    channel.sendall(len(data).to_bytes(4, "little") + data)


def receive(channel: socket.socket) -> Any:  # noqa: ANN401
    """Raises EOFError when the other side is gone."""
    return pickle.loads(_exactly(channel, int.from_bytes(_exactly(channel, 4), "little")))


def _exactly(channel: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        more = channel.recv(nbytes - len(data))
        if not more:
            raise EOFError
        data += more
    return data


if __name__ == "__main__":
    Service(socket.socket(fileno=int(sys.argv[1])), tuple(map(int, sys.argv[2].split(",")))).run()
