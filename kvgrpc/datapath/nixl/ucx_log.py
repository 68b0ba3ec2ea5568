"""UCX's log in this process: the only place where UCX names the transports it chose.

UCX is loaded by NIXL's plugin, reads its environment once, at that time, and prints to stdout by default. Here it logs
into a file in memory instead; its warnings go on to `logging`. If UCX_LOG_LEVEL or UCX_LOG_FILE is set, UCX's log goes
there, and transports stay unnamed. UCX's words when it stops the process go to stderr in any case.
"""

import contextlib
import ctypes
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

_log = logging.getLogger(__name__)

AGENT_CHARS_MAX = 31
"""Number of characters of an agent's name that UCX keeps."""

LaneSets = list[tuple[str, ...]]
"""Sets of transports and devices, each like ("tcp/eth0", "cma/memory")."""

# Transports for which this process's processor moves the bytes, or gives them away, inside its own calls.
_BY_CALLER = frozenset({"tcp", "cma", "sysv", "posix", "self"})
# Transports in which the process that is read takes part, if UCX has no others.
_BY_PEER = frozenset({"tcp", "sysv", "posix"})
_USERS = ("UCX_LOG_LEVEL", "UCX_LOG_FILE")
# UCX 1.23, once for each set of lanes between one agent and its peers:
# ... UCX  INFO    AGENT intra-node cfg#1 rma_am(tcp/lo)  am(tcp/lo cma/memory)  ka(tcp/lo)
_LANES = re.compile(r"UCX +INFO +(\S+) +(?:intra|inter)-node cfg#\d+ (.*)")
_LANE = re.compile(r"[\w.]+/[\w.:]+")
_COMPLAINT = re.compile(r"UCX +(?:WARN|ERROR|FATAL) +(.*)")


def moved_by_caller(lanes: LaneSets) -> bool:
    """Returns True if the process that posts touches its own host memory only inside its calls."""
    return _all_of(_BY_CALLER, lanes)


def written_by_caller(lanes: LaneSets) -> bool:
    """Returns True if writes of any length leave by CMA: inside calls of the writer, straight into the peer's memory.

    UCX uses CMA for all of them if it is among the lanes, and leaves wire-up and keep-alive to the others.
    """
    return bool(lanes) and all("cma" in _transports(some) for some in lanes) and _all_of(_BY_CALLER, lanes)


def received_by_callee(lanes: LaneSets) -> bool:
    """Returns True if peers' writes arrive inside calls of the process that is written to."""
    return _all_of(frozenset({"tcp"}), lanes)


def moved_by_peer(lanes: LaneSets) -> bool:
    """Returns True if reads need the process that is read."""
    return _all_of(_BY_PEER, lanes)


def _all_of(transports: frozenset[str], lanes: LaneSets) -> bool:
    named = set().union(*map(_transports, lanes))
    return bool(named) and named <= transports


def _transports(lanes: Iterable[str]) -> set[str]:
    return {lane.partition("/")[0] for lane in lanes}


class UcxLog:
    """UCX's log in this process; there is one, because UCX has one. Any thread may use it."""

    def __init__(self) -> None:
        self._fd = -1
        self._position = 0
        self._flush: Callable[[], object] | None = None
        self._lanes: dict[str, LaneSets] = {}
        self._complaints: list[str] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """Captures the log of a UCX loaded within. Children do not inherit the variables, since the file is ours."""
        if self._fd >= 0 or any(name in os.environ for name in _USERS):
            yield
            return
        self._fd = os.memfd_create("kvgrpc-ucx-log", os.MFD_CLOEXEC)
        os.environ.update(UCX_LOG_LEVEL="info", UCX_LOG_FILE=f"/proc/self/fd/{self._fd}")
        try:
            yield
        finally:
            for name in _USERS:
                os.environ.pop(name, None)
            self._flush = _flush_function()

    @property
    def is_read(self) -> bool:
        """True if this is UCX's log, so that what is not in it did not happen."""
        return self._flush is not None

    def lanes(self, agent: str) -> LaneSets:
        """Returns the sets of lanes that `agent` has to its peers; empty if unknown.

        UCX logs a set when it is new, and not which peers it serves.
        """
        self._drain()
        return list(self._lanes.get(agent[:AGENT_CHARS_MAX], ()))

    def complaints(self) -> list[str]:
        """Returns warnings and errors since the last call."""
        self._drain()
        complaints, self._complaints = self._complaints, []
        return complaints

    def _drain(self) -> None:
        if not self._flush:
            return
        with self._lock:
            self._flush()
            size = os.fstat(self._fd).st_size
            if size <= self._position:
                return
            text = os.pread(self._fd, size - self._position, self._position).decode(errors="replace")
            os.ftruncate(self._fd, 0)  # gives the memory back; UCX writes on at its position
            self._position = size
        for agent, lanes in _LANES.findall(text):
            self._lanes.setdefault(agent, []).append(tuple(dict.fromkeys(_LANE.findall(lanes))))
        for complaint in _COMPLAINT.findall(text):
            _log.warning("UCX: %s", complaint)
            self._complaints.append(complaint)


def _flush_function() -> Callable[[], object] | None:
    """Returns UCX's own flush: UCX buffers the file, and the C library's flush of all files also waits for stdin."""
    library = re.search(r"/\S*/libucs\b\S*", Path("/proc/self/maps").read_text())
    if not library:
        return None
    return getattr(ctypes.CDLL(library[0]), "ucs_log_flush", None)
