"""Servers in processes of their own: `kvgrpc serve`, as users start it."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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
def served(*arguments: str, port: int = 0) -> Iterator[Served]:
    """`kvgrpc serve` with a small pool, from its first line to its end."""
    command = [sys.executable, "-m", "kvgrpc", "serve", "--port", str(port), "--log-level", "warning"]
    pool = ["--blocks", "64", "--layers", "2", "--kv-heads", "2", "--head-dim", "16", "--data-paths", "shm"]
    process = subprocess.Popen([*command, *pool, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()  # kvgrpc serving ADDRESS engine ID; nothing if it could not start
        yield Served(line.split()[2], process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
