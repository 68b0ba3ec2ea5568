"""Other engines, as this lead knows them: one object per life of a peer, one state, one table."""

import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from kvgrpc.core.tables.transfers import RankPath
from kvgrpc.core.values.bridge import Bridges
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.core.values.ids import peer_key


class PeerState(Enum):
    """Whether a peer can be used now."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    SUSPECT = "suspect"
    DEAD = "dead"


STATES: dict[PeerState, frozenset[PeerState]] = {
    PeerState.CONNECTING: frozenset({PeerState.CONNECTED, PeerState.SUSPECT, PeerState.DEAD}),
    PeerState.CONNECTED: frozenset({PeerState.SUSPECT, PeerState.DEAD}),
    PeerState.SUSPECT: frozenset({PeerState.CONNECTED, PeerState.DEAD}),
    PeerState.DEAD: frozenset(),
}
"""A dead peer stays dead: only a new handshake, which makes a new object, readmits its engine."""


@dataclass(eq=False)
class Peer:
    """One life of another engine."""

    description: EngineDescription
    endpoints: tuple[RankEndpoint, ...]
    bridges: Bridges
    heard: float
    dialled: str = ""
    """The address under which we reached it; empty when it dialled us."""
    state: PeerState = PeerState.CONNECTING
    met: bool = False
    """We dialled it, or its liveness stream has stood: it did more than to introduce itself."""
    forgotten: bool = False
    """It does not know us, or our memory as it is now: the next use dials again."""
    told: int = -1
    """The generation of our memory that it knows; -1: none."""
    replaced_by: str = ""
    """The life of its engine that introduced itself after it."""
    paths: dict[tuple[int, int], RankPath] = field(default_factory=dict)
    """Of a rank of ours and one of its ranks."""
    mapping: set[tuple[int, int]] = field(default_factory=set)
    """Our ranks that are reaching for the memory of its ranks."""
    meets: bool = False
    """Of these one waits for its half, and for the peer's: see `MeetingBegan`."""
    tried: tuple[RankEndpoint, ...] = ()
    """The endpoints that they were given."""
    attempt: int = 0
    """What names their answers."""
    since: float = field(init=False)
    """When it was heard of first."""
    asks: tuple[bytes, ...] = field(default=(), repr=False)
    """What it was told to show here, the first of them in answers: who shows one of these is this life."""
    shows: tuple[bytes, ...] = field(default=(), repr=False)
    """What it has told us to show there, the one that is known to be good first."""
    elder: tuple[bytes, ...] = field(default=(), repr=False)
    """What this life was told while it was declared dead; it was readmitted without showing any of it."""
    accesses: dict[bytes, None] = field(default_factory=dict)
    """Accesses that it asked for here, in the order of asking; with those whose end is still remembered."""
    closed_early: set[bytes] = field(default_factory=set)
    """Those of them that it closed before it opened them."""

    def __post_init__(self) -> None:
        self.since = self.heard

    @property
    def key(self) -> str:
        return peer_key(self.description.engine_id, self.description.incarnation)

    @property
    def address(self) -> str:
        """Where it can be dialled; empty: nowhere."""
        return self.dialled or self.description.address

    def lives_at(self, address: str) -> bool:
        """Whether it was reached there, or says that it is to be reached there."""
        return address in (self.dialled, self.description.address)

    def proves(self, proof: bytes) -> bool:
        """Whether who shows that speaks for this life."""
        return is_one_of(proof, self.asks)

    def was_told(self, told: Iterable[bytes]) -> bool:
        """Whether who speaks for this life now is who was told that in its name. One that was readmitted without a
        proof is not known to be the one before it.
        """
        return not self.elder or any(self.proves(proof) for proof in told)

    @property
    def data_paths(self) -> set[str]:
        """Those by which ranks of both reach each other; empty text for what is not reached."""
        return {path.data_path for path in self.paths.values()}

    @property
    def reachable(self) -> bool:
        """Every rank reaches the memory of all ranks with which it moves bytes."""
        return len(self.paths) == len(self.bridges.pairs) and all(path.data_path for path in self.paths.values())

    @property
    def usable(self) -> bool:
        """An access may be opened there without a handshake."""
        return self.state is PeerState.CONNECTED and not self.forgotten and self.reachable

    def move(self, state: PeerState) -> None:
        """Asserts that the table allows it."""
        assert state is self.state or state in STATES[self.state], f"{self.state} to {state}"
        self.state = state

    def view(self, now: float, open_accesses: int) -> "PeerView":
        return PeerView(
            self.description.engine_id,
            self.description.incarnation,
            self.address,
            self.state,
            tuple(self.paths[pair] for pair in sorted(self.paths)),
            now - self.heard,
            open_accesses,
        )


def is_one_of(proof: bytes, secrets: Iterable[bytes]) -> bool:
    """Whether a proof is one of those secrets. An empty one is none."""
    return bool(proof) and any(hmac.compare_digest(proof, secret) for secret in secrets)


@dataclass(frozen=True)
class PeerView:
    """A peer as it was at one moment."""

    engine_id: str
    incarnation: int
    address: str
    state: PeerState
    paths: tuple[RankPath, ...]
    silence_s: float
    open_accesses: int
