"""Child processes that end with the runner, and whose last words are kept."""

import asyncio
import ctypes
import signal
from contextlib import suppress
from pathlib import Path

STOP_S = 20.0
TAIL_BYTES = 4_000
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """For `preexec_fn`: the kernel ends the child when the runner is gone, however it went."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


async def stop(process: asyncio.subprocess.Process, number: int = signal.SIGTERM) -> None:
    """Ends a child, at the latest by force."""
    with suppress(ProcessLookupError):
        process.send_signal(number)
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def tail(path: Path) -> str:
    """The end of a log."""
    try:
        return path.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
    except OSError:
        return ""
