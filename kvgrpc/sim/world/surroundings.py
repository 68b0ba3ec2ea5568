"""What all hosts of a world share, and who watches them."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvgrpc.core.actions import Action
from kvgrpc.core.events import Event
from kvgrpc.core.tables.transfers import Transfer
from kvgrpc.core.values.ids import peer_key
from kvgrpc.core.values.layout import PoolLayout
from kvgrpc.core.values.limits import Limits
from kvgrpc.sim.world.agenda import Agenda
from kvgrpc.sim.world.memory import Door, KvStore, Prompt
from kvgrpc.sim.world.network import Network
from kvgrpc.sim.world.wires import Wires

KEPT = 256
"""Accesses whose ids can be guessed."""


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
    mirrored: frozenset[str] = frozenset()
    """Addresses of engines whose memory no data path reaches."""
    collective: frozenset[str] = frozenset()
    """Addresses of engines whose ranks send to each other, where both are asked to."""
    given_out: bool = False
    """Servers give out the blocks of their pools, and each engine takes all of its own as its life begins."""
    liars: frozenset[str] = frozenset()
    """Addresses of hosts that lie to others."""
    splits: dict[str, tuple[PoolLayout, int]] = field(default_factory=dict)
    """Of engines that are not alike: by address, the pool of each of their ranks, and how many these are."""
    closing: bool = False
    """Nothing new begins."""
    access_ids: deque[bytes] = field(default_factory=lambda: deque(maxlen=KEPT))
    """The last accesses that any lead has asked for."""
    names: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT))
    """Of which they were: transfers, leases and targets."""
    overhear: list[Callable[[bytes, str], None]] = field(default_factory=list)
    """Who guesses such an id as it is drawn, and learns at which address the access is."""
    store: KvStore = field(default_factory=KvStore)
    doors: dict[str, Door] = field(default_factory=dict)
    """Into the memory of all lives, by the key in their endpoints."""
    wires: Wires = field(default_factory=Wires)
    """To which the ranks of sources are asked to come."""
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

    def pool_of(self, address: str) -> PoolLayout:
        """What one rank of an engine has."""
        return self.splits.get(address, (self.pool, self.ranks))[0]

    def ranks_of(self, address: str) -> int:
        """How many ranks an engine has."""
        return self.splits.get(address, (self.pool, self.ranks))[1]

    def lies(self, life: str) -> bool:
        """Whether a life is one of a liar, or made up by one."""
        return self.network.home(life) in self.liars

    def lied_to(self, transfer: Transfer | None) -> bool:
        """Whether the other side of a transfer is a liar."""
        if transfer is None:
            return False
        return self.lies(peer_key(transfer.peer_engine_id or transfer.peer_address, transfer.peer_incarnation))

    def asked(self, access_id: bytes, address: str) -> None:
        """A lead asks for an access at an address."""
        self.access_ids.append(access_id)
        for overhear in self.overhear:
            overhear(access_id, address)
