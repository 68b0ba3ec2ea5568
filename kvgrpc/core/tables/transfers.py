"""Transfers: the public view of one move of a request's blocks.

`Transfer` is an immutable snapshot. Every change makes a new one with the next event number. The allowed changes of
state are data here. State ("it is over") and memory disposition ("the memory may be reused") are independent.
"""

from dataclasses import field
from enum import Enum
from hashlib import sha256
from typing import NotRequired, TypedDict

from kvgrpc.core.values.records import dataclass
from kvgrpc.errors import NextStep, Reason, note

WHY_BYTES_MAX = 512
"""Maximum length of each text about the choice of a data path, in bytes."""
TRANSFER_BYTES = 4_200
"""Estimated bytes of a transfer without the texts of its call: its phases, its indexes and its row in the ledger."""
REJECTED_MAX = 8
"""Maximum number of rejected data paths that are listed, more than there are."""


class Direction(Enum):
    """The direction of the blocks, seen from this engine."""

    SEND = "send"
    RECEIVE = "receive"


class State(Enum):
    """The state of a transfer."""

    # Hashes by identity, as `timers.Timer` does.
    __hash__ = object.__hash__

    PENDING = "pending"
    ACTIVE = "active"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Disposition(Enum):
    """The disposition of this engine's blocks: whether they may be reused."""

    # Hashes by identity, as `timers.Timer` does.
    __hash__ = object.__hash__

    HELD = "held"
    RETURNED = "returned"
    QUARANTINED = "quarantined"


class Side(Enum):
    """The side on which a failure happened."""

    SOURCE = "source"
    DESTINATION = "destination"


PHASES = ("", "rendezvous", "handshake", "open", "queue", "wire", "checksum", "settle", "readers")
"""Names of the phases of a transfer. Empty for none yet."""

_WAITS = "handshake access blocks step turn readers source registration parts checksums settle"
WAITS = ("", *_WAITS.split())
"""Names of the conditions that a transfer waits for. Empty for none."""

ENDED = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED})

STATES: dict[State, frozenset[State]] = {
    State.PENDING: frozenset({State.ACTIVE, *ENDED}),
    State.ACTIVE: ENDED,
    State.SUCCEEDED: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
}
"""Allowed next states of each state. An end is final."""

DISPOSITIONS: dict[Disposition, frozenset[Disposition]] = {
    Disposition.HELD: frozenset({Disposition.RETURNED, Disposition.QUARANTINED}),
    Disposition.QUARANTINED: frozenset({Disposition.RETURNED}),
    Disposition.RETURNED: frozenset(),
}
"""Allowed next dispositions of each disposition. Returned memory is never taken back."""


@dataclass(frozen=True)
class Failure:
    """The reason why a transfer failed."""

    reason: Reason
    message: str
    phase: str = ""
    """One of `PHASES`."""
    side: Side | None = None
    rank: int | None = None
    next: NextStep | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", note(self.message))


@dataclass(frozen=True)
class Phase:
    """One phase of a transfer. Its name is one of `PHASES`. Times are on the node's clock."""

    name: str
    start: float
    end: float | None = None


@dataclass(frozen=True)
class RankPath:
    """The data path between two ranks."""

    rank: int
    peer_rank: int
    data_path: str
    why: str
    rejected: tuple[tuple[str, str], ...] = ()
    ruled_out: frozenset[str] = frozenset()
    """Data paths among `rejected` that the network between the leads rules out."""

    def __post_init__(self) -> None:
        rejected = tuple((note(name, WHY_BYTES_MAX), note(why, WHY_BYTES_MAX)) for name, why in self.rejected)
        object.__setattr__(self, "rejected", rejected[:REJECTED_MAX])
        object.__setattr__(self, "why", note(self.why, WHY_BYTES_MAX))


@dataclass(frozen=True)
class TransferPath:
    """Bytes that one pair of ranks moved for one transfer."""

    path: RankPath
    nbytes: int = 0
    descriptors: int = 0


@dataclass(frozen=True)
class Transfer:
    """One move of a request's blocks over all ranks, as it is at event `seq`."""

    id: str
    direction: Direction
    created: float
    key: bytes
    owner: str
    state: State = State.PENDING
    memory: Disposition = Disposition.HELD
    tenant: str = ""
    request_id: str = ""
    trace: str = ""
    peer_engine_id: str = ""
    peer_incarnation: int = 0
    peer_address: str = ""
    peer_transfer_id: str = ""
    lease_id: str = ""
    waiting_for: str = ""
    """One of `WAITS`."""
    use_tokens: int = 0
    blocks: int = 0
    nbytes: int = 0
    nbytes_done: int = 0
    phases: tuple[Phase, ...] = ()
    paths: tuple[TransferPath, ...] = ()
    layers_done: tuple[tuple[int, int], ...] = ()
    """RECEIVE by a push: ranges (first, count) of layers whose KV may be used provisionally, in order, not adjacent."""
    part_epoch: int = 0
    """Epoch of the parts of `layers_done`."""
    failure: Failure | None = None
    consumers: int = 0
    consumers_done: int = 0
    priority: int = 0
    seq: int = 0
    ended: float | None = None
    end_seq: int = 0
    """The event that ended it. The table maintains it."""
    queued_bytes: int = 0
    """Bytes still to move while its access is open. The table maintains it."""
    pair_id: str = ""
    """32 hex digits shared by both sides' transfers of one key. They do not reveal the key."""
    over: bool = field(init=False)
    settled: bool = field(init=False)
    """True when it is over and its memory is the engine's again."""

    def __post_init__(self) -> None:
        self.__dict__["over"] = over = self.state in ENDED
        self.__dict__["settled"] = over and self.memory is Disposition.RETURNED

    @property
    def kept_bytes(self) -> int:
        """Estimated bytes, with those that its course adds."""
        return TRANSFER_BYTES + len(self.request_id) + len(self.trace) + len(self.key)

    def has_layers(self, first: int, count: int) -> bool:
        """Returns whether these layers may be used: provisionally, or for good after success."""
        within = any(start <= first and first + count <= start + many for start, many in self.layers_done)
        return within or self.state is State.SUCCEEDED

    def phases_at(self, now: float, begun: str = "") -> tuple[Phase, ...]:
        """Returns the phases with the running one ended, and the phase `begun` after them, if one is named."""
        phases = self.phases
        if phases and phases[-1].end is None:
            phases = (*phases[:-1], Phase(phases[-1].name, phases[-1].start, now))
        return (*phases, Phase(begun, now)) if begun else phases


class TransferTerms(TypedDict):
    """Fields that a call states about the transfer that it makes."""

    direction: Direction
    key: bytes
    tenant: NotRequired[str]
    request_id: NotRequired[str]
    peer_engine_id: NotRequired[str]
    peer_incarnation: NotRequired[int]
    peer_address: NotRequired[str]
    lease_id: NotRequired[str]
    waiting_for: NotRequired[str]
    use_tokens: NotRequired[int]
    blocks: NotRequired[int]
    nbytes: NotRequired[int]
    phases: NotRequired[tuple[Phase, ...]]
    consumers: NotRequired[int]
    priority: NotRequired[int]


class NewTransfer(TransferTerms):
    """Fields that are stated when a transfer is made."""

    owner: str
    trace: NotRequired[str]


class Changes(TypedDict, total=False):
    """Fields that may change in a transfer's life."""

    state: State
    memory: Disposition
    peer_engine_id: str
    peer_incarnation: int
    peer_address: str
    peer_transfer_id: str
    waiting_for: str
    blocks: int
    nbytes: int
    nbytes_done: int
    phases: tuple[Phase, ...]
    paths: tuple[TransferPath, ...]
    layers_done: tuple[tuple[int, int], ...]
    part_epoch: int
    failure: Failure | None
    consumers: int
    consumers_done: int
    ended: float
    owner: str
    priority: int
    lease_id: str
    use_tokens: int


def pair_id(key: bytes) -> str:
    """Returns the id that both sides' transfers of a key share."""
    return sha256(b"kvgrpc pair" + key).hexdigest()[:32]
