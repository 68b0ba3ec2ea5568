"""The child processes of a run, as their driver sees them.

Each has one end of a socket pair. Commands and answers are JSON, one datagram each, and may carry file descriptors. A
child ends when its driver is gone, for whatever reason.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvgrpc.engine.session.exits import ended_with
from kvgrpc.errors import InternalError, Reason

_log = logging.getLogger(__name__)

MESSAGE_BYTES_MAX = 128 << 10
ANSWER_S = 120.0
"""Timeout of a command, in seconds: more than any takes on a busy machine. A child that needs longer is considered
broken.
"""
_END_S = 10.0


class HostFailed(InternalError):
    """Raised when a child process could not perform its command; the text is the child's."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.INTERNAL, message)


class Host:
    """One child process of a role, run by `bench.roles.program`. It takes one command at a time.

    `environment` is added to our own.
    """

    def __init__(self, role: str, environment: Mapping[str, str] | None = None) -> None:
        self.role = role
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(ANSWER_S)
        command = [sys.executable, "-m", "bench.roles.program", role, str(theirs.fileno())]
        # NIXL writes to standard output, where our result goes.
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
        )
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, command: str, fds: Sequence[int] = (), **arguments: Any) -> dict[str, Any]:
        """Performs a command in the child. Raises HostFailed."""
        answer, received = self._exchange(command, fds, arguments)
        for fd in received:
            os.close(fd)
        return answer

    def ask_fd(self, command: str, **arguments: Any) -> tuple[dict[str, Any], int]:
        """Performs a command like `ask`, whose answer carries one file descriptor, which the caller must close."""
        answer, received = self._exchange(command, (), arguments)
        return answer, received[0]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Lets a stopped child run, and stops it again."""
        os.kill(self.pid, signal.SIGCONT)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGSTOP)

    def close(self) -> None:
        """Ends the child. Idempotent."""
        if self._control.fileno() < 0:
            return
        self._control.close()
        if self._process.poll() is None:
            os.kill(self.pid, signal.SIGCONT)
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            _log.warning("the %s process is killed: it did not end in %g s", self.role, _END_S)
            self._process.kill()
            self._process.wait()
        else:
            if code:
                _log.warning("the %s process ended with %s", self.role, ended_with(code))

    def _exchange(
        self, command: str, fds: Sequence[int], arguments: dict[str, Any]
    ) -> tuple[dict[str, Any], list[int]]:
        message = json.dumps({"command": command, "arguments": arguments}).encode()
        try:
            socket.send_fds(self._control, [message], list(fds))
            data, received, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES_MAX, 4)
        except OSError as error:
            raise HostFailed(f"the {self.role} process does not answer {command}: {error}") from error
        if not data:
            raise HostFailed(f"the {self.role} process ended during {command}")
        answer: dict[str, Any] = json.loads(data)
        if "error" in answer:
            raise HostFailed(f"{command} failed in the {self.role} process: {answer['error']}")
        return answer["result"], received
