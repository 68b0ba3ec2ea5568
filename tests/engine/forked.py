"""A process that imports everything once, then forks a child for every descriptor that it receives."""

import faulthandler
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable

END_S = 10.0
"""Time for all children to end after the sender hung up, in seconds; shorter than a test waits for this process."""
SAY_S = 0.5


def fork_for_each(serve: Callable[[int], None]) -> None:
    """Serves each descriptor in a forked child until the sender hangs up. Exits with 1 if a child failed.

    A child that does not end after the hang-up prints where its threads are, and is killed.
    """
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    pids = []
    with socket.socket(fileno=int(sys.argv[1])) as control:
        while True:
            wanted, fds, _, _ = socket.recv_fds(control, 1, 1)
            if not wanted:
                break
            pid = os.fork()
            if pid == 0:
                control.close()
                code = 1
                try:
                    serve(fds[0])
                    code = 0
                finally:
                    os._exit(code)
            os.close(fds[0])
            pids.append(pid)
            control.sendall(f"{pid}\n".encode())
    deadline = time.monotonic() + END_S
    late = [pid for pid in pids if not _ends(pid, deadline - time.monotonic())]
    for pid in late:
        os.kill(pid, signal.SIGUSR1)
        _ends(pid, SAY_S)
        os.kill(pid, signal.SIGKILL)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    sys.exit(bool(late) or any(code not in (0, -signal.SIGKILL) for code in codes))


def _ends(pid: int, within_s: float) -> bool:
    """Returns whether a child ends in time. The child is not reaped."""
    ending = select.poll()
    ending.register(pidfd := os.pidfd_open(pid), select.POLLIN)
    try:
        return bool(ending.poll(max(within_s, 0.0) * 1e3))
    finally:
        os.close(pidfd)
