"""Waits for the end of the process that made hosts, and removes what it left: a run that is killed removes nothing.

The arguments are the id of that process, the address of its local route, and the names of namespaces and devices. The
guard is in a session of its own, so that what ends the run does not end it.
"""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress


def main(owner: int, outside: str, names: list[str]) -> None:
    """Waits, and removes."""
    await_end(owner)
    for name in names:
        remove_namespace(name)
        ip("link", "delete", name)
    ip("route", "delete", "local", outside, "dev", "lo", "table", "local")


def remove_namespace(name: str) -> None:
    """Kills the processes of a namespace, which would keep it, and deletes it."""
    for pid in ip("netns", "pids", name).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    ip("netns", "delete", name)


def await_end(owner: int) -> None:
    """Returns when a process has ended. It is this one's parent, as long as it lives."""
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        return
    if os.getppid() == owner:
        select.select([descriptor], [], [])
    os.close(descriptor)


def ip(*words: str) -> str:
    """Runs `ip`, which fails for what is not there, and returns its output."""
    return subprocess.run(["ip", *words], check=False, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
