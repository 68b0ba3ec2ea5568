"""LateEvents: the events of an engine, some of which arrive later than they could."""

from collections import Counter
from collections.abc import Callable
from typing import Self

from kvgrpc.engine import BlocksReturned, Engine, Event, Failed, Received

Keeps = Callable[[Event], bool]


def ends(event: Event) -> bool:
    """Returns whether the event says how a transfer ended."""
    return isinstance(event, Received | Failed | BlocksReturned)


def last(event: Event) -> bool:
    """Returns whether no event of the same transfer follows."""
    return isinstance(event, Received | BlocksReturned)


class LateEvents:
    """Stands between an engine and its `Engine.poll` while `with` lasts. The events are the lead's own."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._poll, self._due = engine, engine.poll, engine.due
        self._keeps: Keeps = lambda _: False
        self._told: list[Event] = []
        self.kept: list[Event] = []
        """Events that the engine does not know of yet."""
        self.told: Counter[type[Event]] = Counter()
        """Number of events that the engine knows of, by kind."""

    def keep(self, keeps: Keeps) -> None:
        """Keeps such events back from now on."""
        self._keeps = keeps

    def deliver(self) -> None:
        """Keeps nothing any more: the next `poll` has what was kept."""
        self._keeps = lambda _: False
        self._told = self.kept + self._told
        self.kept = []

    def gather(self, timeout_s: float = 0.0) -> None:
        """Takes what is there from the lead, and tells the engine nothing yet."""
        for event in self._poll(timeout_s):
            kept = self._keeps(event)
            (self.kept if kept else self._told).append(event)
            if last(event):
                event.transfer.over = False

    def __enter__(self) -> Self:
        for name, function in (("poll", self._late_poll), ("due", self._late_due)):
            setattr(self._engine, name, function)
        return self

    def __exit__(self, *_: object) -> None:
        for name in ("poll", "due"):
            delattr(self._engine, name)

    def _late_poll(self, timeout_s: float = 0.0) -> list[Event]:
        self.gather(0.0 if self._told else timeout_s)
        told, self._told = self._told, []
        for event in told:
            if last(event):
                event.transfer.over = True
        self.told.update(map(type, told))
        return told

    def _late_due(self) -> bool:
        return bool(self._told) or self._due()
