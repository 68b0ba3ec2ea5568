"""The data path `collective` for tests without a mover and without leads.

Its threads queue work for the mover's thread, which `progress` does, as on polled paths. Asks to a peer go to the peer
that the test names, in place of both leads.
"""

import itertools
import os
import queue
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from kvgrpc.core.values.endpoints import CollectiveEndpoint, RankEndpoint
from kvgrpc.core.values.sends import SendAnswer, SendAsk, Values
from kvgrpc.datapath.base import NotMet, Remote
from kvgrpc.datapath.collective.messages import FRAMING
from kvgrpc.datapath.collective.path import CollectivePath

HOST = "127.0.0.1"
LONG_S = 60.0
"""Maximum wait for a group, in seconds: the first one of a process waits until torch is loaded."""
_NUMBERS = itertools.count(os.getpid() << 20)
"""Numbers of peers' lives: no two lives have one name, even after a path begins anew."""
LEAD, RANK, LOST = "refused by its lead", "not sent by its rank", "nobody knows"
Said = tuple[Values, str, str]
"""Answer of a peer to an ask: the values of its half of a group, why it does not send, and which part refused."""
Leads = Callable[[str, SendAsk], Said]
"""Function that asks a peer's rank to send."""


def collective(memory: Any) -> CollectivePath:
    return CollectivePath(memory, HOST)


class PumpedPath:
    """A data path `collective` that works without a mover."""

    name = "collective"
    needs_polling = True
    peers_need_turns = True

    def __init__(self, memory: Any, make: Callable[[Any], CollectivePath] = collective) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._path = make(memory)
        self._path.bind(self._commands.put, self._want)
        self._leads: dict[str, Leads] = {}

    def offer(self, endpoint: RankEndpoint, peer: str = "") -> RankEndpoint:
        return self._path.offer(endpoint, peer)

    def withdraw(self, peer: str) -> None:
        self._path.withdraw(peer)

    def question(self, _: RankEndpoint) -> None:
        """Asks nothing: this path needs no answer of a process on this host."""

    def connect(self, endpoint: RankEndpoint, leads: Any) -> Remote:
        """Connects to a peer, whose rank `leads` asks to send."""
        name = f"peer-{next(_NUMBERS)}"
        self._leads[name] = leads
        reached: list[Remote | NotMet] = []
        self._path.reach(1, name, endpoint, reached.append)
        self._until(lambda: bool(reached))
        if isinstance(reached[0], NotMet):
            raise reached[0]
        return reached[0]

    def again(self, peer: str, leads: Leads) -> int:
        """Reaches the peer of that name once more, closes the link, and returns its epoch."""
        asked: list[SendAsk] = []

        def asking(name: str, ask: SendAsk) -> Said:
            asked.append(ask)
            return leads(name, ask)

        self._leads[peer] = asking
        reached: list[Remote | NotMet] = []
        self._path.reach(1, peer, RankEndpoint(0, collective=CollectiveEndpoint("gloo", 1, FRAMING)), reached.append)
        self._until(lambda: bool(reached))
        assert not isinstance(reached[0], NotMet), reached
        reached[0].close()
        return asked[0].epoch

    def send(self, peer: str, ask: SendAsk) -> Said:
        """Sends to a peer, as the own lead would have it done."""
        said: list[tuple[Values, str]] = []
        self._path.send(peer, ask, lambda values, error: said.append((values, error.message if error else "")))
        self._until(lambda: bool(said))
        return *said[0], RANK

    def progress(self) -> None:
        while True:
            try:
                self._commands.get_nowait()()
            except queue.Empty:
                return

    def close(self) -> None:
        self._path.close()

    def _want(self, peer: str, _: str, ask: SendAsk) -> None:
        values, error, who = self._leads[peer](peer, ask)
        answer = SendAnswer(
            ask.source_rank, ask.epoch, ask.sequence, values, error, who != LOST, bool(error) and who == RANK
        )
        self._commands.put(partial(self._path.answered, peer, answer))

    def _until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + LONG_S
        while not condition():
            assert time.monotonic() < end
            self._commands.get(timeout=LONG_S)()
