"""A readable trace of a world: all that happened, and the part that led to a violation.

Names of one request (its key, transfers, leases, accesses) are tied together if one line shows them together. So the
names in a violation lead to everything about its request, on all hosts.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any
from zlib import crc32

import numpy as np

from kvgrpc.core.actions import Action, Post, SendOpen, TransferChanged
from kvgrpc.core.events import Event, OpenAccess
from kvgrpc.core.tables.leases import Lease
from kvgrpc.core.values.ids import ACCESS_ID_BYTES
from kvgrpc.errors import KVGrpcError

_NAME = re.compile(r"[tla]-[0-9a-f]{16,}(?:-[0-9a-f]+)?|\br\d+\b")
_LONG = re.compile(r"([tla]-|@)([0-9a-f]{16,32})")
_TIES = (TransferChanged, SendOpen, OpenAccess, Post)
"""Events and actions that show the names of one request together."""
_SILENT = frozenset({
    "call", "content", "claim", "token", "trace", "endpoints", "endpoint", "description", "phases", "paths", "created",
    "seq", "owner", "peer_address", "peer_engine_id", "engine_id", "incarnation", "secret", "push_content", "labels",
    "data_paths", "why", "bytes", "event_seq", "ttl_s", "remaining_s", "cap_remaining_s", "age_s", "memory_generation",
    "operation", "data_path", "rejected", "wire_s", "use_tokens", "token_count", "offer_tokens", "nbytes_done", "times",
    "over", "settled",
})  # fmt: skip
"""Fields that say little about what went wrong."""
_OF_LEASE = ("id", "state", "request_id", "transfer_id", "blocks", "consumers", "renewals")
"""Fields of a lease that are told."""
LINES = 60
EVENT, ACTION = "<", "    >"
"""Marks of the lines of a trace."""


@dataclass(frozen=True)
class _Line:
    text: str
    names: frozenset[str]
    """Names in it; empty if it is shown with everything."""
    event: int
    """Line of the event that led to it, or its own."""


class Digest:
    """A number for all that happens in a world, equal for equal runs; see `surroundings.Watcher`."""

    def __init__(self) -> None:
        self.value = 0

    def event(self, address: str, now: float, event: Event) -> None:
        """Adds an event that a node is about to handle."""
        self.add(_line(address, now, EVENT, event))

    def actions(self, address: str, now: float, actions: list[Action]) -> None:
        """Adds the node's actions."""
        for action in actions:
            self.add(_line(address, now, ACTION, action))

    def note(self, address: str, now: float, what: str) -> None:
        """Adds a mishap of a host."""
        self.add(_note(address, now, what))

    def add(self, line: str) -> None:
        """Adds one line of the trace."""
        self.value = crc32(line.encode(), self.value)


class Trace:
    """Records what happens; see `surroundings.Watcher`. Times are those of the world, in seconds."""

    def __init__(self) -> None:
        self._lines: list[_Line] = []
        self._digest = Digest()
        self._event = 0
        """Line of the event that is being handled."""
        self._tied: dict[str, str] = {}
        """Next name on the way to the one that stands for the request, by name."""

    @property
    def digest(self) -> int:
        """Digest of everything that happened, equal for equal runs."""
        return self._digest.value

    def event(self, address: str, now: float, event: Event) -> None:
        """Records an event that a node is about to handle."""
        self._event = len(self._lines)
        self._add(_line(address, now, EVENT, event), event)

    def actions(self, address: str, now: float, actions: list[Action]) -> None:
        """Records the node's actions."""
        for action in actions:
            self._add(_line(address, now, ACTION, action), action)

    def note(self, address: str, now: float, what: str) -> None:
        """Records a mishap of a host."""
        self._event = len(self._lines)
        self._keep(_note(address, now, what), frozenset())

    def lines(self, about: tuple[str, ...], most: int = LINES) -> list[str]:
        """Returns the last lines about the requests with these names, with mishaps of hosts; all lines if no name is
        known.
        """
        roots = {self._root(name) for text in about for name in _NAME.findall(text) if name in self._tied}
        if not roots:
            return [_short(line.text) for line in self._lines[-most:]]
        shown: dict[int, None] = {}
        for i, line in enumerate(self._lines):
            if not line.names or any(self._root(name) in roots for name in line.names):
                # An action is shown with the event that led to it.
                shown |= {line.event: None, i: None}
        return [_short(self._lines[i].text) for i in list(shown)[-most:]]

    def _add(self, text: str, what: Event | Action) -> None:
        names = frozenset(_NAME.findall(text))
        for name in names:
            self._tied.setdefault(name, name)
        if isinstance(what, _TIES):
            self._tie(names)
        # A line without a name is about a host, and is not shown for requests.
        self._keep(text, names or frozenset({""}))

    def _keep(self, text: str, names: frozenset[str]) -> None:
        self._digest.add(text)
        self._lines.append(_Line(text, names, self._event))

    def _tie(self, names: frozenset[str]) -> None:
        if names:
            first = self._root(min(names))
            for name in names:
                self._tied[self._root(name)] = first

    def _root(self, name: str) -> str:
        while (tied := self._tied.get(name, name)) != name:
            name = tied
        return name


def _line(address: str, now: float, mark: str, what: Event | Action) -> str:
    return f"{now:12.6f} {address} {mark} {tell(what)}"


def _note(address: str, now: float, what: str) -> str:
    return f"{now:12.6f} {address} * {what}"


def tell(what: Any) -> str:
    """Returns an event or action as one line, without fields that say little."""
    if isinstance(what, bytes):
        return f"a-{what.hex()}" if len(what) == ACCESS_ID_BYTES else f"{len(what)} bytes"
    if isinstance(what, tuple | list):
        return f"[{', '.join(tell(item) for item in what)}]"
    if isinstance(what, KVGrpcError):
        return f"{what.reason}: {what.message}"
    if is_dataclass(what) and not isinstance(what, type):
        parts = ", ".join(f"{name} {value}" for name, value in _told(what))
        return f"{type(what).__name__}({parts})"
    plain = what.value if isinstance(what, Enum) else what.tolist() if isinstance(what, np.ndarray) else what
    return str(plain)


def _told(what: Any) -> Iterator[tuple[str, str]]:
    for name in _OF_LEASE if isinstance(what, Lease) else [field.name for field in fields(what)]:
        value = getattr(what, name)
        empty = value is None or (not isinstance(value, np.ndarray) and value in ("", b"", (), 0, False))
        if name not in _SILENT and not empty:
            yield name, tell(value)


def _short(line: str) -> str:
    return _LONG.sub(lambda found: found[1] + found[2][:6], line)
