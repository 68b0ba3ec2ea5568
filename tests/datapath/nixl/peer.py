"""Processes for tests of data path `nixl`: one that offers memory, and one that runs a few lines.

    with NixlPeer((1 << 20,)) as peer:
        remote = reach(path, peer.endpoint)
        ...
        peer.memory  # what its bytes are

Processes are new, not forks, since UCX reads its environment once, when it is loaded.
"""

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.datapath.base import Posting, PostingState
from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.datapath.nixl.path import NixlPath

ROOT = Path(__file__).parents[3]
POLL_S = 0.0002
DEADLINE_S = 20.0
TCP = {"UCX_TLS": "tcp"}
RUN = 8 << 10


def nothing() -> None:
    """Does nothing: a `wake` for tests that poll anyway."""


def runs_over(nbytes: int, run: int = RUN) -> Runs:
    """Makes runs over all bytes of both sides, last run first, so that no two can be joined."""
    place = np.arange(0, nbytes, run, dtype=np.int64)
    return Runs(place[::-1].copy(), place, np.full(len(place), run, dtype=np.int64))


def finish(posting: Posting) -> PostingState:
    """Waits for the end of a posting; fails the test when it does not come."""
    deadline = time.monotonic() + DEADLINE_S
    while posting.poll() is PostingState.PENDING:
        assert time.monotonic() < deadline, "the posting does not end"
    return posting.poll()


def pattern(nbytes: int) -> NDArray[np.uint8]:
    """Returns the bytes of a peer's memory; no two blocks of it are alike."""
    return np.random.default_rng(nbytes).integers(1, 256, nbytes, dtype=np.uint8)


class NixlPeer:
    """The process, as the test sees it; `sizes` are the bytes of its segments, and `env` overrides the test's."""

    def __init__(self, sizes: tuple[int, ...], env: dict[str, str] | None = None) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(DEADLINE_S)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), ",".join(map(str, sizes))]
            self.process = subprocess.Popen(command, env=environment(env), pass_fds=[theirs.fileno()])
        self.memory = np.concatenate([pattern(size) for size in sizes])
        self.endpoint = receive(self._socket)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self._socket.close()  # the process ends when it can read no more
        try:
            self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def ask(self, command: str) -> Any:
        """Runs a function of `Service` there, and returns its result."""
        send(self._socket, command)
        return receive(self._socket)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


PRELUDE = '''
    import contextlib, gc, os, pickle, random, signal, socket, sys, threading
    from dataclasses import replace
    import numpy as np
    from kvgrpc.datapath.base import DataPathFailed, DataPathUnavailable, PostingState
    from kvgrpc.datapath.host.memory import PrivateMemory
    from kvgrpc.datapath.nixl.path import NixlPath
    from tests.datapath.nixl.peer import finish, nothing, runs_over
    from tests.datapath.peers import reach

    endpoint, pid = pickle.loads(bytes.fromhex(sys.argv[1]))
    memory = np.zeros(endpoint.nixl.segments[0].nbytes, dtype=np.uint8)
    runs = runs_over(len(memory))
    path = NixlPath(PrivateMemory.of(memory), "reader")
    remote = reach(path, endpoint)

    def post():
        return remote.read(runs, nothing)

    def under_way():
        """A read that has brought some bytes and is not over; one call can bring all of them."""
        while True:
            memory[:] = 0
            posting = post()
            while posting._state is PostingState.PENDING:
                if memory[:1 << 20].any():
                    return posting
                posting.poll()
'''


def scenario(
    code: str, peer: NixlPeer, env: dict[str, str] | None = None, meanwhile: Callable[[], object] = nothing
) -> "subprocess.CompletedProcess[str]":
    """Runs the lines in a process that has `memory`, a `path` and a `remote`.

    `meanwhile` is called once the process prints a line or ends; after that the process may read a line.
    """
    argument = pickle.dumps((peer.endpoint, peer.process.pid)).hex()
    return run_python(textwrap.dedent(PRELUDE) + textwrap.dedent(code), argument, env, meanwhile)


def run_python(
    code: str, argument: str, env: dict[str, str] | None = None, meanwhile: Callable[[], object] = nothing
) -> "subprocess.CompletedProcess[str]":
    """Runs the lines in a new process, within DEADLINE_S."""
    command = [sys.executable, "-c", textwrap.dedent(code), argument]
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, env=environment(env), stdin=pipe, stdout=pipe, stderr=errors, text=True) as process,
    ):
        assert process.stdin
        assert process.stdout
        watchdog = threading.Timer(DEADLINE_S, process.kill)
        watchdog.start()
        output = process.stdout.readline()
        meanwhile()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write("\n")
            process.stdin.close()
        output += process.stdout.read()
        process.wait()
        watchdog.cancel()
        errors.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, output, errors.read())


def environment(changes: dict[str, str] | None) -> dict[str, str]:
    """Returns this process's environment with `changes`, and with the project's path to import."""
    search_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": search_path, **(changes or {})}


class Service:
    """The service in the process."""

    def __init__(self, channel: socket.socket, sizes: tuple[int, ...]) -> None:
        self._channel = channel
        self._buffers = [pattern(size) for size in sizes]
        self._path = NixlPath(PrivateMemory.of(*self._buffers), "peer")
        self._polls = True
        send(channel, self._path.offer(RankEndpoint(7)))

    def run(self) -> None:
        """Serves until the other side closes the channel."""
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


def receive(channel: socket.socket) -> Any:
    """Receives a value; raises EOFError when the other side is gone."""
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
