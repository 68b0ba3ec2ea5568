"""The lead as a child process: an engine's busy interpreter must not stall leases, streams or settles.

It ends with the engine, however that ends: `--exit-with-engine` makes it watch its session, whose socket the kernel
closes with the engine's process. (Not PR_SET_PDEATHSIG: that follows the thread that started the child.) It has a
session of its own in the terminal's sense, so that Ctrl-C reaches the engine alone, which then ends it in order.

That it serves it says on a pipe of its own, whose other end the engine keeps: so it also misses an engine that ended
before it attached. What it prints goes to a file: libraries log to the standard output, too, and a
pipe that is not read would stop them, and the lead, once it is full.
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
"""A second on an idle machine; many on one where a whole serving stack starts at once."""
STOP_TIMEOUT_S = 15.0
LAST_WORDS_BYTES = 2_000
DIED_S = 1.0
"""A lead whose socket has just closed takes a moment to end."""


class LeadProcess:
    """A `kvgrpc serve` of this engine's own."""

    def __init__(self, listen: str, flags: Sequence[str]) -> None:
        """Starts it and waits until it serves. Raises LeadDied with what it said when it does not."""
        self._listen = listen
        self._home = Home()
        self.socket_path = str(self._home.path / "session.sock")
        self._command = [
            sys.executable, "-m", "kvgrpc", "serve", "--no-pool", "--session-socket", self.socket_path,
            "--exit-with-engine", "--log-level", "warning", *flags,
        ]  # fmt: skip
        self.address = ""
        """Where it serves, or last served."""
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
        """What it printed last, if it has ended."""
        try:
            code = self._process.wait(DIED_S)
        except subprocess.TimeoutExpired:
            return ""
        self._expected.add(code)  # the caller says it
        return f"it ended with {ended_with(code)}. {self._printed()}".strip()

    def stop(self) -> None:
        """Asks it to end, and ends it if it does not; it has ended then. Idempotent."""
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

    # -- the next one, in the place of one that died; nothing of this waits

    def gone(self) -> bool:
        """Whether its process has ended, with all its threads."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Ends it at once."""
        self.killed = True
        self._expected.add(-signal.SIGKILL)
        self._process.kill()

    def start_again(self) -> None:
        """Starts another one at the same socket, with the same flags, and at the same address if that can be had. Only
        when it is gone.
        """
        assert self.gone()
        self._say_end()
        self._hear_no_more()
        self._said.seek(0)
        self._said.truncate()
        same = self.address.rpartition(":")[0] == self._listen.rpartition(":")[0]
        self._begin(self.address if same else self._listen)
        self.address = ""  # of one that does not come to serve

    def fileno(self) -> int:
        """Readable when `serves` has news, or may have."""
        return self._news

    def serves(self) -> bool:
        """Whether it serves. Raises LeadDied when it will not."""
        if not _readable(self._news, 0.0):
            return False
        address = os.read(self._news, select.PIPE_BUF)  # written at once
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
        """It says its address when it serves; the end of the pipe is its own."""
        _readable(self._news, READY_TIMEOUT_S)
        if not self.serves():
            raise self._did_not_start(f"no answer within {READY_TIMEOUT_S:g} s")

    def _did_not_start(self, why: str) -> LeadDied:
        return LeadDied(Reason.PEER_LOST, f"the lead did not start ({why}): {self._printed()}")

    def _say_end(self) -> None:
        """Logs how it ended, unless that was to be expected."""
        code = self._process.returncode
        if code not in self._expected:
            _log.warning("the lead, process %d, ended with %s. %s", self.pid, ended_with(code), self._printed())

    def _hear_no_more(self) -> None:
        if self._news >= 0:
            os.close(self._news)
            self._news = -1

    def _printed(self) -> str:
        """Not by seeking: the lead writes where this end stands."""
        if self._said.closed:
            return ""
        end = os.fstat(self._said.fileno()).st_size
        last = os.pread(self._said.fileno(), LAST_WORDS_BYTES, max(end - LAST_WORDS_BYTES, 0))
        return last.decode(errors="replace").strip()


def _readable(fd: int, timeout_s: float) -> bool:
    """Not select(): that takes no descriptor above 1023."""
    look = select.poll()
    look.register(fd, select.POLLIN)
    return bool(look.poll(timeout_s * 1000))
