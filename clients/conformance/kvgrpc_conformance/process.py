"""Child processes that end with the runner, and whose last words are kept."""

import asyncio
import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

STOP_S = 20.0
TAIL_BYTES = 4_000
_PR_SET_PDEATHSIG = 1
# Loaded here: between fork and exec a lock of the loader may be held by a thread that is not there any more.
_PRCTL = ctypes.CDLL(None).prctl


def end_with_parent() -> None:
    """For `preexec_fn`: the kernel ends the child when the runner is gone, however it went."""
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM)


async def stop(process: asyncio.subprocess.Process, number: int = signal.SIGTERM) -> None:
    """Ends a child, at the latest by force."""
    # Not by `send_signal`: it looks whether the child has ended, and takes its status from who waits for it.
    with suppress(ProcessLookupError):
        os.kill(process.pid, number)
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        await process.wait()


def tail(path: Path, start: int = 0) -> str:
    """The end of a log, of what was written after its first `start` bytes."""
    try:
        return path.read_bytes()[start:][-TAIL_BYTES:].decode(errors="replace")
    except OSError:
        return ""
