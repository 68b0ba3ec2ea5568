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

    def __init__(self, flags: list[str]) -> None:
        """Starts it and waits until it serves. Raises LeadDied with what it said when it does not."""
        self._folder = tempfile.TemporaryDirectory(prefix="kvgrpc-")
        folder = Path(self._folder.name)
        self.socket_path = str(folder / "session.sock")
        ready = folder / "ready.json"
        command = [
            sys.executable, "-m", "kvgrpc", "serve", "--no-pool", "--session-socket", self.socket_path,
            "--exit-with-engine", "--ready-file", str(ready), "--log-level", "warning", *flags,
        ]  # fmt: skip
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed by stop
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=os.environ,
            start_new_session=True,
        )
        try:
            self._wait_ready()
            self.address: str = json.loads(ready.read_text())["address"]
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
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _wait_ready(self) -> None:
        """It says one line on its standard output when it serves; the end of the output is its own."""
        assert self._process.stdout is not None
        readable = select.poll()
        readable.register(self._process.stdout, select.POLLIN)
        if readable.poll(READY_TIMEOUT_S * 1000):
            if self._process.stdout.readline():
                return
            why = f"exit code {self._process.wait()}"
        else:
            why = f"no answer within {READY_TIMEOUT_S:g} s"
        raise LeadDied(Reason.PEER_LOST, f"the lead did not start ({why}): {self._stderr()}")

    def _stderr(self) -> str:
        if self._said.closed:
            return ""
        self._said.seek(0)
        return self._said.read()[-LAST_WORDS_CHARS:].strip()
