"""Processes of an engine: their state, command lines, trees and ends."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path


def runs(pid: int) -> bool:
    """Checks that a process exists and is not just waiting to be reaped."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def tree_of(root: int) -> list[int]:
    """Returns a running process and all processes that it started."""
    rows = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout.split()
    parents = dict(zip(map(int, rows[::2]), map(int, rows[1::2]), strict=True))
    found = [root] if root in parents else []
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def end(pids: Sequence[int]) -> None:
    """Kills the processes that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
