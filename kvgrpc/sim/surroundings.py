"""What all hosts of a world share, and who watches them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvgrpc.core.actions import Action
from kvgrpc.core.events import Event
from kvgrpc.core.layout import PoolLayout
from kvgrpc.core.limits import Limits
from kvgrpc.sim.agenda import Agenda
from kvgrpc.sim.memory import Door, KvStore, Prompt
from kvgrpc.sim.network import Network


class Watcher(Protocol):
    """Who is told of everything that happens; times are those of the world."""

    def event(self, address: str, now: float, event: Event) -> None: ...

    def actions(self, address: str, now: float, actions: list[Action]) -> None: ...

    def note(self, address: str, now: float, what: str) -> None: ...


@dataclass(eq=False)
class Surroundings:
    """The world, as a host sees it."""

    agenda: Agenda
    network: Network
    limits: Limits
    pool: PoolLayout
    ranks: int
    writers: frozenset[str] = frozenset()
    """Data paths over which the source of a push writes."""
    checksums: bool = False
    """What arrives is compared with its source."""
    cannot_set_aside: frozenset[str] = frozenset()
    """Addresses of engines that do not wait for blocks in quarantine."""
    store: KvStore = field(default_factory=KvStore)
    doors: dict[str, Door] = field(default_factory=dict)
    """Into the memory of all lives, by the key in their endpoints."""
    seen: Counter[str] = field(default_factory=Counter)
    """What went wrong, by kind."""
    opened: set[bytes] = field(default_factory=set)
    """Accesses that an issuer has granted."""
    vouched: set[bytes] = field(default_factory=set)
    """Accesses of which an issuer has said, at their end, that all that was moved under them is valid."""
    ambushes: list[Callable[[str, str], None]] = field(default_factory=list)
    """What is going to happen when bytes move next; each is told the addresses of who moves them and of its peer."""
    offered: dict[bytes, Prompt] = field(default_factory=dict)
    """What transfer keys stand for."""
    steps: int = 0
    """Events that nodes handled."""
    handled: Event | None = None
    """The one that a node handled last."""
    watcher: Watcher | None = None
