"""Runs child processes that end with the runner, and keeps the end of their logs."""

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

STOP_S = 20.0
TAIL_BYTES = 4_000
# The kernel ends the child when the runner is gone, whatever ended it. The child asks for that itself before it becomes
# the command. A `preexec_fn` would run between fork and exec and conflict with gRPC's own fork handlers.
_BOUND = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def bound(*command: str) -> tuple[str, ...]:
    """Returns the command for a child that ends with this process."""
    return (sys.executable, "-SEc", _BOUND, str(os.getpid()), *command)


async def stop(process: asyncio.subprocess.Process, number: int = signal.SIGTERM) -> None:
    """Ends a child, by force if it does not end in time."""
    # `send_signal` does not fit: it polls the child, and takes its exit status away from whoever waits for it.
    with suppress(ProcessLookupError):
        os.kill(process.pid, number)
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        await process.wait()


def tail(path: Path, start: int = 0) -> str:
    """Returns the end of a log, of what was written after its first `start` bytes."""
    try:
        return path.read_bytes()[start:][-TAIL_BYTES:].decode(errors="replace")
    except OSError:
        return ""
