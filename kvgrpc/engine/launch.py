"""The lead as a child process: an engine's busy interpreter must not stall leases, streams or settles.

It ends with the engine, however that ends: `--exit-with-engine` makes it watch its session, whose socket the kernel
closes with the engine's process. (Not PR_SET_PDEATHSIG: that follows the thread that started the child.) It has a
session of its own in the terminal's sense, so that Ctrl-C reaches the engine alone, which then ends it in order.
"""

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvgrpc.engine.connection import LeadDied
from kvgrpc.errors import Reason

READY_TIMEOUT_S = 60.0
"""A second on an idle machine; many on one where a whole serving stack starts at once."""
STOP_TIMEOUT_S = 15.0
LAST_WORDS_CHARS = 2_000
DIED_S = 1.0
"""A lead whose socket has just closed takes a moment to end."""


class LeadProcess:
    """A `kvgrpc serve` of this engine's own."""

    def __init__(self, listen: str, flags: Sequence[str]) -> None:
        """Starts it and waits until it serves. Raises LeadDied with what it said when it does not."""
        self._listen = listen
        self._folder = tempfile.TemporaryDirectory(prefix="kvgrpc-")
        folder = Path(self._folder.name)
        self.socket_path = str(folder / "session.sock")
        self._ready = folder / "ready.json"
        self._command = [
            sys.executable, "-m", "kvgrpc", "serve", "--no-pool", "--session-socket", self.socket_path,
            "--exit-with-engine", "--ready-file", str(self._ready), "--log-level", "warning", *flags,
        ]  # fmt: skip
        self.address = ""
        """Where it serves, or last served."""
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed by stop
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
        """What it wrote to its standard error, if it has ended."""
        try:
            code = self._process.wait(DIED_S)
        except subprocess.TimeoutExpired:
            return ""
        return f"it ended with exit code {code}. {self._stderr()}".strip()

    def stop(self) -> None:
        """Asks it to end, and ends it if it does not; it has ended then. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if not self._said.closed:
            self._said.close()
            self._folder.cleanup()
        self._hear_no_more()

    # -- the next one, in the place of one that died; nothing of this waits

    def gone(self) -> bool:
        """Whether its process has ended, with all its threads."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Ends it at once."""
        self.killed = True
        self._process.kill()

    def start_again(self) -> None:
        """Starts another one at the same socket, with the same flags, and at the same address if that can be had. Only
        when it is gone.
        """
        assert self.gone()
        self._hear_no_more()
        self._said.seek(0)
        self._said.truncate()
        same = self.address.rpartition(":")[0] == self._listen.rpartition(":")[0]
        self._begin(self.address if same else self._listen)
        self.address = ""  # of one that does not come to serve

    def fileno(self) -> int:
        """Readable when `serves` has news, or may have."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def serves(self) -> bool:
        """Whether it serves. Raises LeadDied when it will not."""
        assert self._process.stdout is not None
        if not _readable(self._process.stdout.fileno(), 0.0):
            return False
        if not self._process.stdout.readline():
            raise self._did_not_start(f"exit code {self._process.wait()}")
        self.address = json.loads(self._ready.read_text())["address"]
        return True

    def _begin(self, listen: str) -> None:
        self.killed = False
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [*self._command, "--listen", listen],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=os.environ,
            start_new_session=True,
        )

    def _wait_ready(self) -> None:
        """It says one line on its standard output when it serves; the end of the output is its own."""
        _readable(self.fileno(), READY_TIMEOUT_S)
        if not self.serves():
            raise self._did_not_start(f"no answer within {READY_TIMEOUT_S:g} s")

    def _did_not_start(self, why: str) -> LeadDied:
        return LeadDied(Reason.PEER_LOST, f"the lead did not start ({why}): {self._stderr()}")

    def _hear_no_more(self) -> None:
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _stderr(self) -> str:
        if self._said.closed:
            return ""
        self._said.seek(0)
        return self._said.read()[-LAST_WORDS_CHARS:].strip()


def _readable(fd: int, timeout_s: float) -> bool:
    """Not select(): that takes no descriptor above 1023."""
    look = select.poll()
    look.register(fd, select.POLLIN)
    return bool(look.poll(timeout_s * 1000))
