"""Servers forked from one process that has imported everything: a start takes milliseconds, not a second of imports.

The forked process is `kvgrpc serve` in every other respect: its own process, arguments, environment and end. The tests'
process adopts it (PR_SET_CHILD_SUBREAPER), and so can wait for it like for a child of its own.
"""

import atexit
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

from kvgrpc.service.polling import poll_in_place

MESSAGE_BYTES_MAX = 64 * 1024
START_S = 90.0
INSIDE = "TESTS_INSIDE"
"""Environment variable of a server: a tests' module whose `install` it calls before it starts."""
_PR_SET_CHILD_SUBREAPER = 36


class Forked:
    """The part of subprocess.Popen that tests use, for a forked process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Waits for the process and returns its exit code. Raises subprocess.TimeoutExpired."""
        until = time.monotonic() + timeout
        pidfd = -1 if self.poll() is not None else os.pidfd_open(self.pid)
        try:
            while (code := self.poll()) is None:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise subprocess.TimeoutExpired("kvgrpc serve", timeout)
                _readable(pidfd, left_s)
            return code
        finally:
            if pidfd >= 0:
                os.close(pidfd)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Forker:
    """The process that has imported everything. It ends with this process."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._control, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_S)
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.service.forks", str(there.fileno())], pass_fds=[there.fileno()]
            )
        atexit.register(self.close)

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], output: int) -> Forked:
        """Forks `kvgrpc` with these arguments, in exactly this environment. Its output goes to the descriptor."""
        message = json.dumps({"arguments": list(arguments), "environment": dict(environment)}).encode()
        socket.send_fds(self._control, [message], [output])
        return Forked(int(self._control.recv(32)))

    def close(self) -> None:
        self._control.close()
        self._process.wait(START_S)


def _readable(fd: int, timeout_s: float) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll(timeout_s * 1000)


def _serve(line: dict[str, object], output: int) -> NoReturn:
    """Turns this process into the server."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(line["environment"])  # type: ignore[call-overload]
    sys.argv = ["kvgrpc", *line["arguments"]]  # type: ignore[misc]
    from kvgrpc.cli import main

    if module := os.environ.get(INSIDE):
        importlib.import_module(module).install()
    main()
    sys.exit(0)


def _main() -> None:
    poll_in_place(os.environ)  # before the import of gRPC, which comes before any server can set it
    import kvgrpc.cli.app
    import kvgrpc.server  # noqa: F401 - every server imports it

    control = socket.socket(fileno=int(sys.argv[1]))
    told, tell = os.pipe()
    while True:
        message, fds, _, _ = socket.recv_fds(control, MESSAGE_BYTES_MAX, 1)
        if not message:
            return
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                control.close()
                os.close(told)
                os.close(tell)
                _serve(json.loads(message), fds[0])
            os.write(tell, str(pid).encode())
            os._exit(0)  # orphans the server, so that the tests' process adopts it
        os.waitpid(between, 0)
        control.sendall(os.read(told, 32))
        os.close(fds[0])


if __name__ == "__main__":
    _main()
