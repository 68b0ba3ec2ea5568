"""Transfers: the public view of one move of a request's blocks.

`Transfer` is an immutable snapshot; every change makes a new one with the next event number. Which state may follow
which is data, here; state and memory are two independent things: "it is over" and "you may reuse the memory".
"""

from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from typing import NotRequired, TypedDict

from kvgrpc.errors import NextStep, Reason, note

WHY_BYTES_MAX = 512
"""Bytes of text that say why a data path was taken or not, for each rank."""
TRANSFER_BYTES = 4_200
"""Of one, without the texts of its call: with its phases, its indexes, and its row in the ledger."""
REJECTED_MAX = 8
"""Data paths of which it is said; more than there are."""


class Direction(Enum):
    """Which way the blocks go, seen from this engine."""

    SEND = "send"
    RECEIVE = "receive"


class State(Enum):
    """Whether it is over."""

    # As in `timers.Timer`.
    __hash__ = object.__hash__

    PENDING = "pending"
    ACTIVE = "active"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Disposition(Enum):
    """Whether this engine's blocks may be reused."""

    # As in `timers.Timer`.
    __hash__ = object.__hash__

    HELD = "held"
    RETURNED = "returned"
    QUARANTINED = "quarantined"


class Side(Enum):
    """Where a failure happened."""

    SOURCE = "source"
    DESTINATION = "destination"


PHASES = ("", "rendezvous", "handshake", "open", "queue", "wire", "checksum", "settle", "readers")
"""How far a transfer is; empty: none yet."""

WAITS = (
    "", "handshake", "access", "blocks", "step", "turn", "readers", "source", "registration", "parts", "checksums",
    "settle",
)  # fmt: skip
"""What a transfer waits for; empty: nothing."""

ENDED = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED})

STATES: dict[State, frozenset[State]] = {
    State.PENDING: frozenset({State.ACTIVE, *ENDED}),
    State.ACTIVE: ENDED,
    State.SUCCEEDED: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
}
"""Which state may follow which: an end is for ever."""

DISPOSITIONS: dict[Disposition, frozenset[Disposition]] = {
    Disposition.HELD: frozenset({Disposition.RETURNED, Disposition.QUARANTINED}),
    Disposition.QUARANTINED: frozenset({Disposition.RETURNED}),
    Disposition.RETURNED: frozenset(),
}
"""Which disposition may follow which: returned memory is never taken back."""


@dataclass(frozen=True)
class Failure:
    """Why a transfer failed."""

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
    """One phase of a transfer; times on the node's clock. Its name is one of `PHASES`."""

    name: str
    start: float
    end: float | None = None


@dataclass(frozen=True)
class RankPath:
    """How two ranks move bytes."""

    rank: int
    peer_rank: int
    data_path: str
    why: str
    rejected: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        rejected = tuple((note(name, WHY_BYTES_MAX), note(why, WHY_BYTES_MAX)) for name, why in self.rejected)
        object.__setattr__(self, "rejected", rejected[:REJECTED_MAX])
        object.__setattr__(self, "why", note(self.why, WHY_BYTES_MAX))


@dataclass(frozen=True)
class TransferPath:
    """What one rank moved for one transfer."""

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
    """That `layers_done` is of."""
    failure: Failure | None = None
    consumers: int = 0
    consumers_done: int = 0
    priority: int = 0
    seq: int = 0
    ended: float | None = None
    queued_bytes: int = 0
    """What has not moved yet, while its access is open; the table keeps it."""
    pair_id: str = ""
    """32 hex digits that both sides' transfers of one key have; they do not tell the key."""

    @property
    def over(self) -> bool:
        return self.state in ENDED

    @property
    def kept_bytes(self) -> int:
        """What it weighs, with what its course adds to it."""
        return TRANSFER_BYTES + len(self.request_id) + len(self.trace) + len(self.key)

    @property
    def settled(self) -> bool:
        """Over, and its memory is the engine's again."""
        return self.over and self.memory is Disposition.RETURNED

    def has_layers(self, first: int, count: int) -> bool:
        """Whether these layers may be used: provisionally, or for good after success."""
        within = any(start <= first and first + count <= start + many for start, many in self.layers_done)
        return within or self.state is State.SUCCEEDED

    def phase_started(self, name: str, now: float) -> tuple[Phase, ...]:
        """The phases with the running one ended and `name` begun."""
        return (*self.phases_ended(now), Phase(name, now))

    def phases_ended(self, now: float) -> tuple[Phase, ...]:
        """The phases with the running one ended."""
        if not self.phases or self.phases[-1].end is not None:
            return self.phases
        last = self.phases[-1]
        return (*self.phases[:-1], Phase(last.name, last.start, now))


class Wanted(TypedDict):
    """What a call states of the transfer that it makes."""

    direction: Direction
    key: bytes
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


class NewTransfer(Wanted):
    """What is stated when a transfer is made."""

    owner: str
    trace: NotRequired[str]


class Changes(TypedDict, total=False):
    """What may change in a transfer's life."""

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
    """What both sides' transfers of a key are known by."""
    return sha256(b"kvgrpc pair" + key).hexdigest()[:32]
