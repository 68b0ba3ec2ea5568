"""The lead as a child process: an engine's busy interpreter must not stall leases, streams or settles.

The lead ends with the engine, however that ends: `--exit-with-engine` makes it watch its session, whose socket the
kernel closes with the engine's process. (Not PR_SET_PDEATHSIG: that follows the thread that started the child.) A
terminal session of the lead's own makes Ctrl-C reach only the engine, which then ends the lead in order.

The lead says that it serves on a pipe whose other end the engine keeps: so it also notices an engine that ended before
it attached. Output of the lead goes to a file: libraries log to the standard output too, and a pipe that nobody reads
would stop the lead once it is full.
"""

import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from kvgrpc.engine.session.connection import LeadDied
from kvgrpc.engine.session.exits import UNPREPARED, ended_with
from kvgrpc.engine.session.socket_folder import Home
from kvgrpc.errors import Reason

_log = logging.getLogger(__name__)

READY_TIMEOUT_S = 60.0
"""Timeout for the start of a lead, in seconds: one on an idle machine, many while a whole serving stack starts."""
STOP_TIMEOUT_S = 15.0
LAST_WORDS_BYTES = 2_000
DIED_S = 1.0
"""Time that a lead whose socket has just closed gets to end, in seconds."""


class LeadProcess:
    """A `kvgrpc serve` process of this engine's own."""

    def __init__(self, listen: str, flags: Sequence[str]) -> None:
        """Starts the lead and waits until it serves. Raises LeadDied with its output if it does not."""
        self._listen = listen
        self._home = Home()
        self.socket_path = str(self._home.path / "session.sock")
        serve = [sys.executable, "-m", "kvgrpc", "serve", "--no-pool", "--exit-with-engine", "--log-level", "warning"]
        self._command = [*serve, "--session-socket", self.socket_path, *flags]
        self.address = ""
        """Address at which the lead serves, or last served; empty until it serves."""
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop
        self._begin(listen)
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def last_words(self) -> str:
        """Returns how the lead ended and what it printed last; empty if the lead still runs."""
        try:
            code = self._process.wait(DIED_S)
        except subprocess.TimeoutExpired:
            return ""
        self._expected.add(code)  # the caller reports it
        return f"it ended with {ended_with(code)}. {self._printed()}".strip()

    def stop(self) -> None:
        """Asks the lead to end, and kills it if it does not; it has ended when this returns. Idempotent."""
        if self._process.poll() is None:
            self._expected.update(UNPREPARED)
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                _log.warning("the lead, process %d, is killed: it did not end in %g s", self.pid, STOP_TIMEOUT_S)
                self.kill()
                self._process.wait()
        if not self._said.closed:
            self._say_end()
            self._said.close()
            self._home.remove()
        self._hear_no_more()

    # -- replacing a lead that died; nothing here waits

    def gone(self) -> bool:
        """Returns whether the process has ended, with all its threads."""
        return self._process.poll() is not None

    def kill(self) -> None:
        self.killed = True
        self._expected.add(-signal.SIGKILL)
        self._process.kill()

    def start_again(self) -> None:
        """Starts another process at the same socket, with the same flags, and at the same address if that can be had.
        The last process must be gone.
        """
        assert self.gone()
        self._say_end()
        self._hear_no_more()
        self._said.seek(0)
        self._said.truncate()
        same = self.address.rpartition(":")[0] == self._listen.rpartition(":")[0]
        self._begin(self.address if same else self._listen)
        self.address = ""  # so that a start that fails does not choose it again

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `serves` may have news."""
        return self._news

    def serves(self) -> bool:
        """Returns whether the lead serves. Raises LeadDied when it never will."""
        if not _readable(self._news, 0.0):
            return False
        address = os.read(self._news, select.PIPE_BUF)  # written in one piece
        if not address:
            code = self._process.wait()
            self._expected.add(code)
            raise self._did_not_start(ended_with(code))
        self.address = address.decode().strip()
        return True

    def _begin(self, listen: str) -> None:
        self.killed = False
        self._expected = {0}
        self._news, there = os.pipe()
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [*self._command, "--listen", listen, "--launched", str(there)],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                pass_fds=[there],
                env=os.environ,
                start_new_session=True,
            )
        finally:
            os.close(there)

    def _wait_ready(self) -> None:
        """Waits until the lead says its address, or ends. Raises LeadDied if the lead ends, or takes too long."""
        _readable(self._news, READY_TIMEOUT_S)
        if not self.serves():
            raise self._did_not_start(f"no answer within {READY_TIMEOUT_S:g} s")

    def _did_not_start(self, why: str) -> LeadDied:
        return LeadDied(Reason.PEER_LOST, f"the lead did not start ({why}): {self._printed()}")

    def _say_end(self) -> None:
        """Logs how the lead ended, unless that was to be expected."""
        code = self._process.returncode
        if code not in self._expected:
            _log.warning("the lead, process %d, ended with %s. %s", self.pid, ended_with(code), self._printed())

    def _hear_no_more(self) -> None:
        if self._news >= 0:
            os.close(self._news)
            self._news = -1

    def _printed(self) -> str:
        """Returns the end of the lead's output, without seeking: the lead writes at the position of this file."""
        if self._said.closed:
            return ""
        end = os.fstat(self._said.fileno()).st_size
        last = os.pread(self._said.fileno(), LAST_WORDS_BYTES, max(end - LAST_WORDS_BYTES, 0))
        return last.decode(errors="replace").strip()


def _readable(fd: int, timeout_s: float) -> bool:
    """Returns whether a descriptor becomes readable in time. Not select(): it takes no descriptor above 1023."""
    look = select.poll()
    look.register(fd, select.POLLIN)
    return bool(look.poll(timeout_s * 1000))
