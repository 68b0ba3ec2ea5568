"""Transfers: the public view of one move of a request's blocks.

`Transfer` is an immutable snapshot; every change makes a new one with the next event number. Which state may follow
which is data, here; state and memory are two independent things: "it is over" and "you may reuse the memory".
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from hashlib import sha256
from typing import NotRequired, TypedDict, Unpack

from kvgrpc.core.values.ids import transfer_id
from kvgrpc.errors import NotFound, Reason, note

WHY_BYTES_MAX = 512
"""Bytes of text that say why a data path was taken or not, for each rank."""
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

    HELD = "held"
    RETURNED = "returned"
    QUARANTINED = "quarantined"


class Next(Enum):
    """What would help after a failure."""

    RETRY_HERE = "retry_here"
    RETRY_OTHER_CONSUMER = "retry_other_consumer"
    RECOMPUTE = "recompute"
    FIX_REQUEST = "fix_request"


class Side(Enum):
    """Where a failure happened."""

    SOURCE = "source"
    DESTINATION = "destination"


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
    side: Side | None = None
    rank: int | None = None
    next: Next | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", note(self.message))


@dataclass(frozen=True)
class Phase:
    """One phase of a transfer; times on the node's clock."""

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
    pair_id: str = ""
    """32 hex digits that both sides' transfers of one key have; they do not tell the key."""

    @property
    def over(self) -> bool:
        return self.state in ENDED

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


@dataclass
class TransferTable:
    """All transfers of one incarnation, and the log of their changes. `history` is at least 1."""

    incarnation: int
    history: int
    seq: int = 0
    _numbers: int = 0
    _live: dict[str, Transfer] = field(default_factory=dict)
    _past: OrderedDict[str, Transfer] = field(default_factory=OrderedDict)
    """Ended well or cancelled, oldest first."""
    _failed: OrderedDict[str, Transfer] = field(default_factory=OrderedDict)
    """Failures, oldest first. They are kept longest: routers and operators ask about them."""
    _by_key: dict[bytes, dict[str, None]] = field(default_factory=dict)
    _left: dict[str, None] = field(default_factory=dict)
    """Those in quarantine whose table was taken over: their blocks are of the memory of a life before."""
    _log: deque[Transfer] = field(default_factory=deque)
    counts: dict[State, int] = field(default_factory=lambda: dict.fromkeys(State, 0))

    def create(self, now: float, **fields: Unpack[NewTransfer]) -> Transfer:
        """A new PENDING transfer."""
        self._numbers += 1
        self.seq += 1
        id_ = transfer_id(self.incarnation, self._numbers)
        transfer = Transfer(id=id_, created=now, seq=self.seq, pair_id=pair_id(fields["key"]), **fields)
        self._by_key.setdefault(transfer.key, {})[id_] = None
        self.counts[transfer.state] += 1
        return self._store(transfer)

    def change(self, transfer_id: str, **changes: Unpack[Changes]) -> Transfer:
        """The transfer with these changes. Asserts that the tables allow them: callers decide, tables guard."""
        old = self._live[transfer_id]
        state, memory = changes.get("state", old.state), changes.get("memory", old.memory)
        assert state is old.state or state in STATES[old.state], f"{old.state} to {state}"
        assert memory is old.memory or memory in DISPOSITIONS[old.memory], f"{old.memory} to {memory}"
        self.counts[old.state] -= 1
        self.counts[state] += 1
        self.seq += 1
        return self._store(_changed(old, changes, self.seq))

    def get(self, transfer_id: str) -> Transfer:
        """Raises NotFound (TRANSFER_NOT_FOUND)."""
        found = self.find(transfer_id)
        if found is None:
            raise NotFound(
                Reason.TRANSFER_NOT_FOUND,
                f"no transfer {transfer_id} here; if it was one, treat its memory as quarantined",
            )
        return found

    def find(self, transfer_id: str) -> Transfer | None:
        """The transfer, also from the history, or None."""
        return self._live.get(transfer_id) or self._past.get(transfer_id) or self._failed.get(transfer_id)

    def with_key(self, key: bytes) -> list[Transfer]:
        """Transfers with that key that are not in the history yet, oldest first."""
        return [self._live[id_] for id_ in self._by_key.get(key, ())]

    def archivable(self, transfer_id: str) -> bool:
        """Whether it is a settled transfer, in the history or on its way there."""
        transfer = self.find(transfer_id)
        return transfer is not None and transfer.settled

    def archive(self, transfer_id: str) -> bool:
        """Moves a settled transfer to the bounded history, if it is not there yet; False when it is not one."""
        if not self.archivable(transfer_id):
            return False
        transfer = self._live.get(transfer_id)
        if transfer is None:
            return True
        del self._live[transfer_id]
        ids = self._by_key[transfer.key]
        del ids[transfer_id]
        if not ids:
            del self._by_key[transfer.key]
        past = self._failed if transfer.state is State.FAILED else self._past
        past[transfer_id] = transfer
        if len(self._past) + len(self._failed) > self.history:
            # The newest stays in any case: the event that ended it is about to read it.
            oldest = next(iter(self._past), transfer_id)
            (self._past if oldest != transfer_id else self._failed).popitem(last=False)
        return True

    def take_over(self, old: "TransferTable", failure: Failure, now: float) -> list[Transfer]:
        """The transfers of a life that a defect ended: what was not over has failed, and memory that was held is in
        quarantine. The changes that this makes. Rows only are read: what ties them together may be half changed.
        """
        self.seq = old.seq
        self.counts |= {end: old.counts.get(end, 0) for end in ENDED}
        changed = []
        for transfer in sorted(old, key=lambda t: t.created):
            self._live[transfer.id] = transfer
            self._by_key.setdefault(transfer.key, {})[transfer.id] = None
            ends: Changes = {}
            if not transfer.over:
                self.counts[transfer.state] += 1
                phase = transfer.phases[-1].name if transfer.phases else ""
                ends = {"state": State.FAILED, "failure": replace(failure, phase=phase), "ended": now}
                ends |= {"phases": transfer.phases_ended(now), "waiting_for": ""}
            if transfer.memory is Disposition.HELD:
                ends["memory"] = Disposition.QUARANTINED
            if ends:
                changed.append(self.change(transfer.id, **ends))
            if transfer.memory is not Disposition.RETURNED:
                self._left[transfer.id] = None
            self.archive(transfer.id)
        return changed

    def memory_gone(self) -> list[Transfer]:
        """The memory of earlier lives is gone. Returns the transfers that are settled by that."""
        left, self._left = self._left, {}
        changed = [self.change(id_, memory=Disposition.RETURNED) for id_ in left]
        for id_ in left:
            self.archive(id_)
        return changed

    @property
    def quarantined(self) -> bool:
        """Whether blocks of this life are in quarantine, or were when their transfer ended."""
        return any(t.memory is Disposition.QUARANTINED and t.id not in self._left for t in self)

    def changes_after(self, seq: int) -> list[Transfer] | None:
        """Changes after `seq`, oldest first, or None when some are no longer known."""
        if seq >= self.seq:
            return []
        if not self._log or self._log[0].seq > seq + 1:
            return None
        return [change for change in self._log if change.seq > seq]

    @property
    def live(self) -> int:
        """Transfers that are not in the history."""
        return len(self._live)

    def __iter__(self) -> Iterator[Transfer]:
        """Live ones and history, newest first."""
        known = [*self._live.values(), *self._past.values(), *self._failed.values()]
        return iter(sorted(known, key=lambda t: t.created, reverse=True))

    def unfinished(self) -> list[Transfer]:
        """Those that are not over, oldest first."""
        return [t for t in self._live.values() if not t.over]

    @property
    def going_on(self) -> int:
        """How many are not over."""
        return self.counts[State.PENDING] + self.counts[State.ACTIVE]

    @property
    def oldest(self) -> str:
        """The oldest that is not over; empty when all are."""
        return next((t.id for t in self._live.values() if not t.over), "")

    def _store(self, transfer: Transfer) -> Transfer:
        self._live[transfer.id] = transfer
        self._log.append(transfer)
        if len(self._log) > self.history:
            self._log.popleft()
        return transfer


def pair_id(key: bytes) -> str:
    """What both sides' transfers of a key are known by."""
    return sha256(b"kvgrpc pair" + key).hexdigest()[:32]


def _changed(old: Transfer, changes: Changes, seq: int) -> Transfer:
    """Does what `dataclasses.replace` does, in a tenth of the time: a pull changes its transfer six times."""
    new = object.__new__(Transfer)
    new.__dict__.update(old.__dict__, **changes)
    new.__dict__["seq"] = seq
    return new
