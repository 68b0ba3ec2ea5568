"""Other engines as this lead knows them: one object for each life of a peer."""

import hmac
from collections.abc import Iterable
from dataclasses import field
from enum import Enum
from functools import partial

from kvgrpc.core.tables.transfers import RankPath
from kvgrpc.core.values.bridge import Bridges
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.core.values.ids import peer_key
from kvgrpc.core.values.records import dataclass


class PeerState(Enum):
    """The reachability of a peer."""

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
"""Allowed next states. A dead peer stays dead: only a new handshake, which makes a new object, readmits its engine."""


@dataclass(eq=False)
class Peer:
    """One life of another engine."""

    description: EngineDescription
    endpoints: tuple[RankEndpoint, ...]
    bridges: Bridges
    heard: float
    dialled: str = ""
    """The address at which we reached it. Empty when it dialled us."""
    state: PeerState = PeerState.CONNECTING
    met: bool = False
    """True when we dialled it or its liveness stream has stood, so it did more than introduce itself."""
    forgotten: bool = False
    """True when it does not know us, or our present memory. The next use dials again."""
    told: int = -1
    """The generation of our memory that it knows. -1 for none."""
    replaced_by: str = ""
    """The life of its engine that introduced itself after it."""
    paths: dict[tuple[int, int], RankPath] = field(default_factory=dict)
    """Data path for each pair of our rank and its rank."""
    mapping: set[tuple[int, int]] = field(default_factory=set)
    """Pairs of our rank and its rank in which ours is reaching for the other's memory."""
    meets: set[tuple[int, int]] = field(default_factory=set)
    """Pairs that waited for each other's half in the last mapping (`MeetingBegan`), and may meet at the next try."""
    tried: tuple[RankEndpoint, ...] = ()
    """The endpoints that our ranks were given."""
    attempt: int = 0
    """Number that identifies the ranks' answers."""
    since: float = field(init=False)
    """Time at which it was first heard of."""
    key: str = field(init=False)
    """The life, by which tables know it."""
    asks: tuple[bytes, ...] = field(default=(), repr=False)
    """Proofs that it was told to show here; answers contain the first. A caller that shows one of them is this life."""
    shows: tuple[bytes, ...] = field(default=(), repr=False)
    """Proofs that it told us to show there, the one known to be good first."""
    elder: tuple[bytes, ...] = field(default=(), repr=False)
    """Proofs told to this life before it was declared dead. It was readmitted without showing any of them."""
    accesses: dict[bytes, None] = field(default_factory=dict)
    """Accesses that it asked for here, in that order, with closed ones that are still remembered."""
    closed_early: set[bytes] = field(default_factory=set)
    """Accesses among them that it closed before it opened them."""
    reads_by: tuple[str, ...] = ()
    """Data paths by which it last said that it reads what is pushed to it; empty: not known."""

    def __post_init__(self) -> None:
        self.since = self.heard
        self.key = peer_key(self.description.engine_id, self.description.incarnation)

    @property
    def address(self) -> str:
        """The address at which it can be dialled. Empty for none."""
        return self.dialled or self.description.address

    def lives_at(self, address: str) -> bool:
        """Returns whether it was reached at that address, or says that it can be."""
        return address in (self.dialled, self.description.address)

    def proves(self, proof: bytes) -> bool:
        """Returns whether the proof is one that this life was told to show."""
        return is_one_of(proof, self.asks)

    def was_told(self, told: Iterable[bytes]) -> bool:
        """Returns whether the speaker for this life is the one that was told those proofs. A life readmitted without a
        proof is not known to be the one before it.
        """
        return not self.elder or any(self.proves(proof) for proof in told)

    @property
    def data_paths(self) -> set[str]:
        """Data paths between ranks of both sides, with "" for pairs that do not reach each other."""
        return {path.data_path for path in self.paths.values()}

    @property
    def reachable(self) -> bool:
        """True when every rank reaches the memory of all ranks with which it moves bytes."""
        for path in self.paths.values():
            if not path.data_path:
                return False
        return len(self.paths) == len(self.bridges.pairs)

    @property
    def usable(self) -> bool:
        """True when an access may be opened there without a handshake."""
        return self.state is PeerState.CONNECTED and not self.forgotten and self.reachable

    def move(self, state: PeerState) -> None:
        """Changes the state. Asserts that `STATES` allows it."""
        assert state is self.state or state in STATES[self.state], f"{self.state} to {state}"
        self.state = state


def is_one_of(proof: bytes, secrets: Iterable[bytes]) -> bool:
    """Returns whether a proof is one of those secrets. An empty proof is none."""
    return bool(proof) and any(map(partial(hmac.compare_digest, proof), secrets))
