"""Leads between ranks of two engines in one process: asks to send reach the peer's rank, answers the asking rank."""

import itertools
import queue
import threading
from collections.abc import Callable
from typing import Any

from kvgrpc.core.events import MeetingBegan, SendPosted, SendWanted
from kvgrpc.core.values.sends import SendAnswer, SendAsk
from kvgrpc.datapath.mover import Mover
from kvgrpc.datapath.reports import Report

Name = tuple[str, int]
"""An engine, and the number of a rank."""


class Leads:
    """The leads of both engines, each named `peer` by the other. They handle reports of meetings and sends, and no
    others.
    """

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._movers: dict[Name, Mover] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # guards the fields below
        self._asks: dict[str, tuple[Name, SendAsk]] = {}
        self.heard: list[tuple[Name, Report]] = []
        """Reports of meetings and sends, with the reporting rank."""

    def add(self, rank: Name, mover: Mover) -> None:
        self._movers[rank] = mover

    def reports_of(self, rank: Name, rest: "queue.SimpleQueue[Report]") -> Callable[[Report], None]:
        """Returns the report callback of a rank's mover; reports of other kinds go to `rest`."""

        def report(said: Report) -> None:
            if isinstance(said, MeetingBegan | SendWanted | SendPosted):
                with self._lock:
                    self.heard.append((rank, said))
            match said:
                case MeetingBegan():
                    pass
                case SendWanted():
                    self._wanted(rank, said)
                case SendPosted():
                    self._posted(said)
                case _:
                    rest.put(said)

        return report

    def kinds(self, rank: Name) -> list[type[Any]]:
        """Returns the kinds of the rank's reports of meetings and sends, in order."""
        with self._lock:
            return [type(said) for name, said in self.heard if name == rank]

    def heard_of(self, rank: Name, kind: type[Any]) -> bool:
        return kind in self.kinds(rank)

    def _wanted(self, rank: Name, said: SendWanted) -> None:
        name = f"send {next(self._numbers)}"
        with self._lock:
            self._asks[name] = rank, said.ask
        (source,) = (other for other in self._movers if other[0] != rank[0] and other[1] == said.ask.source_rank)
        self._movers[source].send(name, self._peer, said.ask)

    def _posted(self, said: SendPosted) -> None:
        with self._lock:
            rank, ask = self._asks.pop(said.name)
        refused = bool(said.message)
        regroup = refused and not said.permanent
        answer = SendAnswer(
            ask.source_rank, ask.epoch, ask.sequence, said.values, said.message, True, regroup, said.permanent
        )
        self._movers[rank].answer_send(self._peer, answer)
