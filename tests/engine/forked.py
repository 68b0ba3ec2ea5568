"""A process that has imported what others need, and forks one of them for every descriptor that it is sent."""

import os
import signal
import socket
import sys
from collections.abc import Callable


def fork_for_each(serve: Callable[[int], None]) -> None:
    """Serves each descriptor in a process of its own, until whoever sends them hangs up; fails if one of them did."""
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
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    sys.exit(any(code not in (0, -signal.SIGKILL) for code in codes))
