"""Backlog: the calls that a server of gRPC has and that it has not handed over to Python.

gRPC counts calls when they come, for channelz. It tells the count in no other way.
"""

import json
import re
import threading
from collections.abc import Callable
from typing import TypeVar

from grpc._cython import cygrpc  # type: ignore[attr-defined]  # the types of gRPC leave it out

_Server = TypeVar("_Server")
_STARTED = re.compile(rb'"callsStarted":"(\d+)"')
_UNKNOWN = 0
"""Number that no server has."""
_MAKING = threading.Lock()
"""Lock of whoever makes a server, so that two threads do not make each other try again."""


def with_backlog(make: Callable[[], _Server]) -> tuple[_Server, "Backlog"]:
    """Returns a server that `make` has made, and its backlog.

    gRPC does not say by which number channelz knows a server. The number is certain if only one is new. If another
    server of this process was made meanwhile, this one is left, and made again. A server that channelz does not know
    has a backlog that is always empty.
    """
    with _MAKING:
        while True:
            before = max(_servers_after(-1), default=0)
            server = make()
            new = _servers_after(before)
            if len(new) < 2:
                return server, Backlog(new[0] if new else _UNKNOWN)


def _servers_after(number: int) -> list[int]:
    """Returns the numbers by which channelz knows the servers of this process, those that are greater than `number`."""
    found: list[int] = []
    while True:
        page = json.loads(cygrpc.channelz_get_servers(number + 1))
        found += [int(row["ref"]["serverId"]) for row in page.get("server", ())]
        if page.get("end") or not page.get("server"):
            return found
        number = found[-1]


class Backlog:
    """The backlog of one server."""

    def __init__(self, server_id: int) -> None:
        self.server_id = server_id
        """Number by which channelz knows the server."""
        self.handed_over = 0
        """Number of calls that gRPC has handed over, and of those that it never will."""

    def count(self) -> int:
        """Returns the number of calls that wait; 0 for a server that has ended. Takes tens of microseconds."""
        try:
            found = _STARTED.search(cygrpc.channelz_get_server(self.server_id))
        except ValueError:
            return 0
        started = int(found[1]) if found else 0
        self.handed_over = min(self.handed_over, started)  # one that was forgotten has come after all
        return started - self.handed_over

    def forget(self) -> int:
        """Counts no call that waits now: its caller has given it up, and gRPC hands such a call over to nobody. Returns
        their number.
        """
        count = self.count()
        self.handed_over += count
        return count
