"""Runs servers in processes of their own with `kvgrpc serve`, as users do."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

READY_S = 60
STOP_S = 20


@dataclass(frozen=True)
class Served:
    """A running server."""

    address: str
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


@contextmanager
def served(*arguments: str, port: int = 0, stderr: IO[str] | None = None) -> Iterator[Served]:
    """Runs `kvgrpc serve` with a small pool, and ends the process on exit. Its errors go to `stderr`, or to ours."""
    command = [sys.executable, "-m", "kvgrpc", "serve", "--port", str(port), "--log-level", "warning"]
    pool = ["--blocks", "64", "--layers", "2", "--kv-heads", "2", "--head-dim", "16", "--data-paths", "shm"]
    process = subprocess.Popen([*command, *pool, *arguments], stdout=subprocess.PIPE, stderr=stderr, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()  # "kvgrpc serving ADDRESS engine ID", or empty if the start failed
        yield Served(line.split()[2], process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
