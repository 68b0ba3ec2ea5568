"""State that all hosts of a world share, and the protocol of a watcher."""

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
from sim.world.agenda import Agenda
from sim.world.memory import KvStore, MemoryDoor, Prompt
from sim.world.network import Network
from sim.world.wires import Wires

KEPT = 256
"""Number of accesses whose ids can be guessed."""


class Watcher(Protocol):
    """Observer of everything that happens; times are those of the world."""

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
    """True if what arrives is compared with its source."""
    cannot_set_aside: frozenset[str] = frozenset()
    """Addresses of engines that do not wait for blocks in quarantine."""
    mirrored: frozenset[str] = frozenset()
    """Addresses of engines whose memory no data path reaches."""
    collective: frozenset[str] = frozenset()
    """Addresses of engines whose ranks send to each other, if both are asked to."""
    given_out: bool = False
    """True if servers give out the blocks of their pools. Each engine takes all of its own when its life begins."""
    liars: frozenset[str] = frozenset()
    """Addresses of hosts that lie to others."""
    splits: dict[str, tuple[PoolLayout, int]] = field(default_factory=dict)
    """Unlike engines by address: the pool of each rank, and the number of ranks."""
    closing: bool = False
    """True once nothing new begins."""
    access_ids: deque[bytes] = field(default_factory=lambda: deque(maxlen=KEPT))
    """Last accesses that any lead has asked for."""
    names: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT))
    """Names of their transfers, leases and targets."""
    overhear: list[Callable[[bytes, str], None]] = field(default_factory=list)
    """Callbacks that guess such an id as it is drawn, and learn the access's address."""
    store: KvStore = field(default_factory=KvStore)
    doors: dict[str, MemoryDoor] = field(default_factory=dict)
    """Doors into the memory of all lives, by the key in their endpoints."""
    wires: Wires = field(default_factory=Wires)
    """Wires that the ranks of sources are asked to join."""
    seen: Counter[str] = field(default_factory=Counter)
    """Number of things that went wrong, by kind."""
    opened: set[bytes] = field(default_factory=set)
    """Accesses that an issuer has granted."""
    vouched: set[bytes] = field(default_factory=set)
    """Accesses whose issuer said, at their end, that all bytes moved under them are valid."""
    ambushes: list[Callable[[str, str], None]] = field(default_factory=list)
    """Callbacks for the next posting. Each gets the addresses of the mover and of its peer."""
    offered: dict[bytes, Prompt] = field(default_factory=dict)
    """Prompts by transfer key."""
    steps: int = 0
    """Number of events that nodes have handled."""
    handled: Event | None = None
    """The event that a node handled last."""
    watcher: Watcher | None = None

    def pool_of(self, address: str) -> PoolLayout:
        """Returns the pool of one rank of an engine."""
        return self.splits.get(address, (self.pool, self.ranks))[0]

    def ranks_of(self, address: str) -> int:
        """Returns the number of ranks of an engine."""
        return self.splits.get(address, (self.pool, self.ranks))[1]

    def lies(self, life: str) -> bool:
        """Returns True if a life is one of a liar, or made up by one."""
        return self.network.home(life) in self.liars

    def lied_to(self, transfer: Transfer | None) -> bool:
        """Returns True if the other side of a transfer is a liar."""
        if transfer is None:
            return False
        return self.lies(peer_key(transfer.peer_engine_id or transfer.peer_address, transfer.peer_incarnation))

    def asked(self, access_id: bytes, address: str) -> None:
        """Takes note that a lead asks for an access at an address."""
        self.access_ids.append(access_id)
        for overhear in self.overhear:
            overhear(access_id, address)
