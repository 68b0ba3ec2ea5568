"""Two processes for tests of writes by data path `nixl`: a target whose memory the test can see, and a source.

    with Pair(TCP) as pair:
        pair.source.ask("write")
        ...
        pair.memory  # the target's, whatever became of its process

Each process runs its data path in a loop, as a mover does, and answers one command after the other.
"""

import contextlib
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.datapath.base import DataPathFailed, PostingState
from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.datapath.host.process import HeldProcess
from kvgrpc.datapath.nixl.path import NixlPath, NixlRemote
from kvgrpc.datapath.nixl.posting import NixlPosting
from tests.datapath.nixl.peer import (
    DEADLINE_S,
    POLL_S,
    RUN,
    environment,
    nothing,
    pattern,
    receive,
    runs_over,
    send,
)
from tests.datapath.peers import reach

# Two slices of many rows each: a process is stopped or killed within one.
BYTES = 64 << 20


class Process:
    """A source or a target, as the test sees it."""

    def __init__(self, role: str, memory_fd: int, env: dict[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(DEADLINE_S)
        with theirs:
            command = [
                sys.executable,
                "-m",
                "tests.datapath.nixl.pair",
                role,
                str(theirs.fileno()),
                str(memory_fd),
            ]
            self._process = subprocess.Popen(command, env=environment(env), pass_fds=[theirs.fileno(), memory_fd])
        self.endpoint: RankEndpoint = receive(self._socket)

    def ask(self, command: str, *arguments: object) -> Any:
        """Runs a command there, and returns its result."""
        send(self._socket, (command, *arguments))
        return receive(self._socket)

    def stop(self) -> None:
        """Stops the process, and returns when it no longer runs."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kills the process, and returns when it is gone."""
        self._process.kill()
        self._process.wait()

    def end(self) -> int:
        """Ends the process, and returns its exit code."""
        with contextlib.suppress(ProcessLookupError):
            self.go_on()
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(DEADLINE_S)
        self.kill()
        raise AssertionError("it does not end")


class Pair:
    """A source that is connected to a target; one write was made, and the target's memory is zero again."""

    def __init__(self, env: dict[str, str]) -> None:
        fd = os.memfd_create("target")
        os.ftruncate(fd, BYTES)
        self.memory: NDArray[np.uint8] = np.frombuffer(mmap.mmap(fd, BYTES), dtype=np.uint8)
        self.target = Process("target", fd, env)
        self.source = Process("source", fd, env)
        os.close(fd)
        self.source.ask("connect", self.target.endpoint)
        self.write_all()

    def write_all(self) -> None:
        """Makes a write from start to end, and clears the memory."""
        self.source.ask("write")
        assert self.source.ask("finish") == (PostingState.DONE, True)
        self.memory[:] = 0

    def begin(self) -> None:
        """Begins a write, and returns when some of its bytes have arrived."""
        self.source.ask("write")
        until(lambda: bool(self.memory[:: 64 << 10].any()))

    def stop_under_a_write(self, process: Process) -> None:
        """Stops a process when some bytes of a write have arrived, and some have not."""
        self.begin()
        process.stop()
        while self.memory.all():
            process.go_on()
            self.source.ask("finish")
            self.memory[:] = 0
            self.begin()
            process.stop()

    def landed(self) -> int:
        return int(np.count_nonzero(self.memory))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self.source, self.target):
            with contextlib.suppress(AssertionError):
                process.end()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline


class Target:
    """The target, in its own process."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.path = NixlPath(PrivateMemory.of(memory), "target")
        self._source: HeldProcess | None = None

    def turn(self) -> None:
        self.path.progress()

    def turns(self) -> None:
        """Takes so many turns that nothing is left to receive."""
        for _ in range(2000):
            self.path.progress()

    def late_writes(self) -> str:
        return self.path.late_writes

    def needs_turns(self) -> bool:
        return self.path.peers_need_turns

    def hold(self, source: RankEndpoint) -> None:
        """Connects to the source, as ranks do both ways, and holds its process."""
        self._source = reach(self.path, source).process

    def source_ended(self) -> tuple[bool, bool]:
        """Tells whether the source's process is gone, and whether that is a sufficient proof of rest."""
        assert self._source is not None
        return self._source.ended, self.path.ends_with_process

    def close(self) -> None:
        self.path.close()

    def rekey(self) -> RankEndpoint:
        self.path.rekey()
        return self.path.offer(RankEndpoint(7))


class Source:
    """The source, in its own process; `target` is the memory that it writes."""

    def __init__(self, target: NDArray[np.uint8]) -> None:
        self._target = target
        self._own = pattern(BYTES)
        self.path = NixlPath(PrivateMemory.of(self._own), "source")
        self._run = 0
        self._nbytes = 0
        self._remote: NixlRemote | None = None
        self._posting: NixlPosting | None = None

    def turn(self) -> None:
        if self._posting:
            self._posting.poll()
        self.path.progress()

    def connect(self, endpoint: RankEndpoint) -> None:
        self._remote = reach(self.path, endpoint)

    def write(self, run: int = RUN, nbytes: int = BYTES) -> str:
        """Writes `nbytes` bytes, the last run first; returns why nothing was started, or an empty text."""
        assert self._remote
        self._run, self._nbytes = run, nbytes
        try:
            self._posting = self._remote.write(runs_over(nbytes, run), nothing)
        except DataPathFailed as error:
            return error.message
        return ""

    def state(self) -> PostingState:
        """Returns the state of the posting after some turns."""
        assert self._posting
        for _ in range(200):
            self.turn()
        return self._posting.poll()

    def finish(self) -> tuple[PostingState, bool]:
        """Returns how the posting ended, and whether all bytes had arrived at that moment."""
        assert self._posting
        posting = self._posting
        until(lambda: posting.poll() is not PostingState.PENDING)
        there, own = (memory[: self._nbytes].reshape(-1, self._run) for memory in (self._target, self._own))
        return posting.poll(), bool(np.array_equal(there, own[::-1]))

    def cut(self) -> None:
        """Shuts down every connection to another process's agent."""
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as one:
                if one.family != socket.AF_UNIX:
                    one.getpeername()
                    one.shutdown(socket.SHUT_RDWR)

    def close(self) -> PostingState:
        self.path.close()
        assert self._posting
        return self._posting.poll()


def main(role: str, fd: int, memory_fd: int) -> None:
    memory = np.frombuffer(mmap.mmap(memory_fd, BYTES), dtype=np.uint8)
    service = Target(memory) if role == "target" else Source(memory)
    with socket.socket(fileno=fd) as channel:
        send(channel, service.path.offer(RankEndpoint(7)))
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                if select.select([channel], [], [], POLL_S)[0]:
                    command, *arguments = receive(channel)
                    send(channel, getattr(service, command)(*arguments))
                service.turn()
    service.path.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
