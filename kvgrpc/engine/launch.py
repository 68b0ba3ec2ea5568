"""The lead as a child process: an engine's busy interpreter must not stall leases, streams or settles."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvgrpc.errors import Reason, Unavailable

READY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0
_LOOK_S = 0.02


class LeadDied(Unavailable):
    """The lead ended without being asked to. All that it knew is over; memory comes back only as proved."""


class LeadProcess:
    """A `kvgrpc serve` of this engine's own. It ends with the engine: its session socket then has nobody left."""

    def __init__(self, flags: list[str]) -> None:
        """Starts it and waits until it serves. Raises LeadDied with what it said when it does not."""
        self._folder = tempfile.TemporaryDirectory(prefix="kvgrpc-")
        folder = Path(self._folder.name)
        self.socket_path = str(folder / "session.sock")
        ready = folder / "ready.json"
        command = [
            sys.executable, "-m", "kvgrpc", "serve", "--no-pool", "--session-socket", self.socket_path,
            "--ready-file", str(ready), "--log-level", "warning", *flags,
        ]  # fmt: skip
        self._said = (folder / "stderr").open("w+")
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._said, env=os.environ
        )
        self.address = self._wait_ready(ready)

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def said(self) -> str:
        """What it wrote to its standard error."""
        self._said.seek(0)
        return self._said.read().strip()

    def stop(self) -> None:
        """Asks it to end, and ends it if it does not. Idempotent."""
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

    def _wait_ready(self, ready: Path) -> str:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if ready.exists():
                address: str = json.loads(ready.read_text())["address"]
                return address
            if self._process.poll() is not None:
                break
            time.sleep(_LOOK_S)
        said, code = self.said(), self._process.poll()
        self.stop()
        raise LeadDied(Reason.PEER_LOST, f"the lead did not start (exit code {code}): {said}")
