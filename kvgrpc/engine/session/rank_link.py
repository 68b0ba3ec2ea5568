"""RankLink: the way from a worker to a lead on another host, by a process beside the worker (`kvgrpc/rank_link`).

The worker speaks to the link process as to a lead, in frames of a session; the link process speaks gRPC. So the
engine's process has no gRPC thread, and its busy interpreter does not look like a dead host. The kernel still tells the
end of either process to the other one by the end of their connection.
"""

import json
import logging
import os
import socket
import subprocess
import sys
import weakref

from kvgrpc.engine.session.connection import LeadConnection
from kvgrpc.engine.session.exits import ended_with
from kvgrpc.engine.ticket import RankCredentials
from kvgrpc.errors import Reason, Unavailable

_log = logging.getLogger(__name__)

END_S = 5.0


class RankLink:
    """The link process, and connections through it. The link process ends with this process."""

    def __init__(self, address: str, credentials: RankCredentials | None = None) -> None:
        """Starts the link process. `address`: the lead's, host:port. Without `credentials` the link process takes the
        paths of its environment.
        """
        shown = [] if credentials is None else [json.dumps(credentials.paths())]
        self._address = address
        self._control, there = socket.socketpair()
        _all.add(self)  # first, since another thread may fork at any time
        try:
            with there:
                self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                    [sys.executable, "-m", "kvgrpc.rank_link", str(there.fileno()), address, *shown],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[there.fileno()],
                    start_new_session=True,
                )
        except BaseException:
            self._control.close()
            raise

    def connect(self) -> LeadConnection:
        """Returns a new connection. Raises Unavailable if the link process has ended."""
        here, there = socket.socketpair()
        with there:
            try:
                socket.send_fds(self._control, [b"."], [there.fileno()])
            except OSError as error:
                here.close()
                what = f"the process that links this rank to its lead at {self._address} is gone"
                raise Unavailable(Reason.PEER_UNREACHABLE, what) from error
        return LeadConnection(here)

    @property
    def alive(self) -> bool:
        """True while the link process runs."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Ends the link process. Idempotent."""
        if self._control.fileno() < 0:
            return
        self._control.close()
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            _log.warning("the process that links this rank to its lead is killed: it did not end in %g s", END_S)
            self._process.kill()
            self._process.wait()
        else:
            if code:
                _log.warning("the process that links this rank to its lead ended with %s", ended_with(code))

    def let_go(self) -> None:
        """Closes the copy of a forked child: the link is not the child's."""
        self._control.close()


_all: "weakref.WeakSet[RankLink]" = weakref.WeakSet()


def _let_go() -> None:
    """Closes the copies of a forked child, which would keep a link process alive beyond the end of its worker."""
    for link in list(_all):
        link.let_go()


os.register_at_fork(after_in_child=_let_go)
