"""Leases: time-bounded read pins on finished blocks.

A lease is LIVE until exactly one event ends it. The end is final and has a reason. Expiry fires before any event of the
same moment, by this node's clock only. A renewal never shortens a lease and never passes its cap.

Blocks may be taken back from a soft lease, which is neither firm nor claimed; see `send.firmness`.

A consumer is done when it received the KV, gave up for good or was cancelled, and has no open access. Consumers are
counted by identity, not by messages.
"""

from collections.abc import Hashable, Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple, Self

from kvgrpc.core.tables.ledger import Ledger, RowKind, texts_bytes
from kvgrpc.core.tables.offer_index import indexed_bytes
from kvgrpc.core.tables.remembered import Remembered
from kvgrpc.core.values.block_ids import Blocks, keeping, kept, kept_bytes, no_blocks
from kvgrpc.core.values.content import ContentId
from kvgrpc.core.values.grants import OnAbort
from kvgrpc.core.values.owners import within
from kvgrpc.core.values.telemetry import MoveTelemetry
from kvgrpc.errors import InternalError, KVGrpcError, NotFound, PreconditionFailed, Reason


class LeaseState(Enum):
    """The states of a lease."""

    LIVE = "live"
    EXPIRED = "expired"
    RELEASED = "released"
    DONE = "done"
    VOIDED = "voided"
    LOST = "lost"
    RECLAIMED = "reclaimed"


STATES: dict[LeaseState, frozenset[LeaseState]] = {
    LeaseState.LIVE: frozenset(
        {
            LeaseState.EXPIRED,
            LeaseState.RELEASED,
            LeaseState.DONE,
            LeaseState.VOIDED,
            LeaseState.LOST,
            LeaseState.RECLAIMED,
        }
    ),
    LeaseState.EXPIRED: frozenset(),
    LeaseState.RELEASED: frozenset(),
    LeaseState.DONE: frozenset(),
    LeaseState.VOIDED: frozenset(),
    LeaseState.LOST: frozenset(),
    LeaseState.RECLAIMED: frozenset(),
}

END_REASON: dict[LeaseState, Reason] = {
    LeaseState.EXPIRED: Reason.LEASE_EXPIRED,
    LeaseState.RELEASED: Reason.LEASE_RELEASED,
    LeaseState.DONE: Reason.LEASE_RELEASED,
    LeaseState.VOIDED: Reason.LEASE_VOIDED,
    LeaseState.LOST: Reason.INTERNAL_DEFECT,
    LeaseState.RECLAIMED: Reason.LEASE_RECLAIMED,
}
"""Reason told to a reader that comes too late."""


LEASE_BYTES = 5_000
"""Estimated bytes of a live lease without texts, blocks and digests: its pin, deadlines and row in the ledger."""
ENDED_LEASE_BYTES = 2_200
"""Estimated bytes of an ended lease without its texts and `remembered.ROW_BYTES`."""


@keeping("blocks")
@dataclass(eq=False)
class Lease:
    """One lease. Times are on the node's clock."""

    id: str
    blocks: Blocks
    content: ContentId
    granted: float
    ttl_s: float
    """The grant's TTL. A renewal without a TTL uses it."""
    deadline: float
    cap: float
    """Time that no renewal passes."""
    firm_ttl_s: float
    """Time in seconds for which it is firm after its hand-over, and after its last claimer has gone."""
    firm_until: float
    """Time before which it is not soft, claimed or not."""
    consumers: int
    on_abort: OnAbort
    owner: str
    transfer_id: str = ""
    request_id: str = ""
    trace: str = ""
    after_step: int = 0
    request_time_us: int = 0
    """Begin time of the request that handed over, in microseconds. 0 when unknown."""
    kept_until: float = 0.0
    """Time before which not even an older request may take it. Unlike `firm_until`, renewals do not move it."""
    yielded: bool = False
    """True when an older request took it although it was weakly claimed."""
    pushed: bool = False
    """True when its blocks are pushed part by part, so only the push opens accesses on it."""
    takes_registrations: bool = False
    """True when a destination that registers for it gets it pushed."""
    labels: tuple[tuple[str, str], ...] = ()
    tenant: str = ""
    bound_to: str = ""
    """Name of the one consumer that may use its grant; empty: any of the tenant."""
    findable: bool = False
    """True when it is in the index of offers while it lives."""
    stands_for: tuple[str, ...] = ()
    """Leases for one consumer each, which are read when this one is."""
    state: LeaseState = LeaseState.LIVE
    renewals: int = 0
    last_ttl_s: float = 0.0
    """TTL of the last grant or renewal, in seconds."""
    finished: set[str] = field(default_factory=set)
    """Consumers, by engine id, that received the KV, gave up for good or were cancelled."""
    received: set[str] = field(default_factory=set)
    """Consumers in `finished` that received the KV."""
    accesses: dict[bytes, str] = field(default_factory=dict)
    """Open accesses on it, in the order of opening -> their consumer."""
    waiting: set[bytes] = field(default_factory=set)
    """Accesses that wait to be opened on it."""
    readers: dict[str, int] = field(default_factory=dict)
    """Number of open accesses of each consumer."""
    missed: bool = False
    """True when a reader came after its end."""
    nbytes_done: int = 0
    """Bytes that its readers say they moved."""
    telemetries: tuple[MoveTelemetry, ...] = ()
    """Telemetry of each consumer that has everything, for a push that this engine's ranks moved."""
    checksums: tuple[bytes, ...] = ()
    """CRC-32C of its blocks, by rank, in the order of its groups and their blocks; see `ChecksumPrefetch`. Empty when
    unknown.
    """
    uncopied: set[int] = field(default_factory=set)
    """Numbers of its parts that are not in the mirrors yet, where its engine has mirrors. These must not be read. A
    hand-over to readers is part 0.
    """
    failed: str = ""
    """Reason why its blocks never came into the mirrors. Empty unless that failed."""
    trouble: str = ""
    """Reason why the last failed consumer failed."""
    cancelled: str = ""
    """Reason why its transfer was cancelled for all consumers. Empty when it was not."""
    cancelled_by: dict[str, str] = field(default_factory=dict)
    """Cancelled consumers, by engine id -> reason."""

    def snapshot(self) -> Self:
        """Returns a copy for readers, which stays as the lease is now. It keeps no digests and no checksums."""
        made = copy(self)
        made.accesses, made.readers, made.finished = dict(self.accesses), dict(self.readers), set(self.finished)
        if made.checksums or made.content.digests:
            made.forget_content()
        return made

    def renew(self, now: float, ttl_s: float | None) -> None:
        """Extends the deadline to `ttl_s` (None: the lease's own) from now, up to the cap. Never shortens it."""
        self.last_ttl_s = self.ttl_s if ttl_s is None else ttl_s
        self.deadline = max(self.deadline, min(now + self.last_ttl_s, self.cap))
        self.renewals += 1

    def opened(self, access_id: bytes, consumer: str) -> None:
        self.accesses[access_id] = consumer
        self.readers[consumer] = self.readers.get(consumer, 0) + 1

    def closed(self, access_id: bytes) -> None:
        """Removes an open access, if there is one."""
        consumer = self.accesses.pop(access_id, None)
        if consumer is not None:
            self.readers[consumer] -= 1
            if not self.readers[consumer]:
                del self.readers[consumer]

    def read_as(self, other: "Lease", nbytes: int) -> None:
        """Counts the readers of `other`, which read this lease's blocks too, and adds their bytes."""
        self.finished |= other.finished
        self.received |= other.received
        self.nbytes_done += nbytes

    @property
    def read(self) -> bool:
        """True while an access on it is open or waiting."""
        return bool(self.accesses or self.waiting)

    @property
    def done(self) -> int:
        return len(self.finished - self.readers.keys())

    def end(self, state: LeaseState) -> None:
        """Ends the lease. Asserts that it was LIVE, which callers check first."""
        assert state in STATES[self.state], f"{self.state} to {state}"
        self.state = state

    def forget_blocks(self) -> None:
        """Forgets blocks, checksums and digests, which may be large. Only how the lease ended is remembered."""
        self.blocks = no_blocks(len(self.blocks))
        self.forget_content()

    def forget_content(self) -> None:
        """Forgets checksums and digests. Only the number of tokens is remembered."""
        self.checksums = ()
        self.content = ContentId(self.content.tokens, opaque=b"forgotten")

    @property
    def live(self) -> bool:
        return self.state is LeaseState.LIVE

    @property
    def kept_bytes(self) -> int:
        """Estimated bytes, with its pin while it lives. The content of a push is part of the push's bytes."""
        texts = len(self.id) + len(self.request_id) + len(self.trace)
        if self.labels or self.stands_for:
            texts += texts_bytes(*[side for pair in self.labels for side in pair], *self.stands_for)
        if not self.live:
            return ENDED_LEASE_BYTES + texts
        content = 0 if self.pushed else len(self.content.digests)
        if self.findable:
            content += indexed_bytes(self.content)
        return LEASE_BYTES + texts + content + 2 * kept_bytes(kept(self))

    @property
    def end_reason(self) -> Reason:
        """Reason told to a reader that comes too late. The lease has ended."""
        if self.failed:
            return Reason.SOURCE_FAILED
        return Reason.CANCELLED if self.cancelled else END_REASON[self.state]


class LeaseTimes(NamedTuple):
    """Times of a lease at one moment, in seconds."""

    remaining_s: float
    """Time until it ends. 0 when it has ended, as is `cap_remaining_s`."""
    cap_remaining_s: float
    age_s: float
    soft_in_s: float | None
    """Time until it may be taken back unless it is claimed; 0: now. None while it is claimed, and once it has ended."""


def ended_error(lease: Lease) -> KVGrpcError:
    """Returns the error for a call that needs an ended lease."""
    if lease.cancelled:
        return PreconditionFailed(Reason.CANCELLED, lease.cancelled)
    if lease.failed:
        return PreconditionFailed(Reason.SOURCE_FAILED, lease.failed)
    kind = InternalError if lease.state is LeaseState.LOST else PreconditionFailed
    how = f"has ended ({lease.state.value}); the KV must be computed or handed over anew"
    return kind(lease.end_reason, f"lease {lease.id} {how}")


class LeaseTable:
    """Live leases by id, oldest first, and the latest ended ones."""

    def __init__(self, ended_kept: int, ledger: Ledger | None = None) -> None:
        self._live: dict[str, Lease] = {}
        self._ledger = ledger or Ledger()
        self._ended = Remembered[str, Lease](ended_kept, ledger=self._ledger, kind=RowKind.ENDED_LEASE)
        """Only their number and bytes are bounded: a caller may come late after any time."""
        self.ends: dict[LeaseState, int] = {state: 0 for state in LeaseState if state is not LeaseState.LIVE}
        """Number of leases that ended, by how they ended. Read-only outside."""

    def enter(self, ledger: Ledger) -> None:
        """Enters the leases that ended in an earlier life into a new ledger."""
        self._ledger = ledger
        self._ended.enter(ledger)

    def add(self, lease: Lease, payer: str = "") -> None:
        """Adds a new lease. Its owner pays for it unless `payer` is named."""
        self._live[lease.id] = lease
        self._ledger.keep(RowKind.LEASE, lease.id, payer or lease.owner, lease.kept_bytes)

    def weigh(self, lease: Lease) -> None:
        """Updates the weight of a live lease that has other blocks."""
        self._ledger.weigh(RowKind.LEASE, lease.id, lease.kept_bytes)

    def known(self, lease_id: str) -> bool:
        """Returns whether that id is or was in use, as far as remembered."""
        return lease_id in self._live or lease_id in self._ended

    def find(self, lease_id: str) -> Lease | None:
        """Returns the lease, live or ended, or None."""
        return self._live.get(lease_id) or self._ended.get(lease_id)

    def stood_for(self, lease: Lease) -> list[Lease]:
        """Returns the live leases that `lease` stands for: one reader reads it in place of each of them. Its owner may
        know of them.
        """
        found = [self.find(lease_id) for lease_id in lease.stands_for]
        return [other for other in found if other is not None and other.live and within(lease.owner, other.tenant)]

    def keep_others(self, lease: Lease) -> None:
        """Keeps the leases that this one stands for while it lasts, up to their caps."""
        for other in self.stood_for(lease):
            other.deadline = max(other.deadline, min(lease.deadline, other.cap))

    def get(self, lease_id: str, caller: str = "") -> Lease:
        """Returns the lease, live or ended. Raises NotFound (LEASE_NOT_FOUND), also for a lease of another tenant than
        that of `caller`, if one is named.
        """
        found = self.find(lease_id)
        if found is None or not within(caller, found.tenant):
            raise NotFound(Reason.LEASE_NOT_FOUND, f"no lease {lease_id} here")
        return found

    def ended(self, lease: Lease, now: float) -> None:
        """Moves an ended lease out of the live ones and forgets its blocks and digests, which may be large."""
        del self._live[lease.id]
        self.ends[lease.state] += 1
        self._ledger.drop(RowKind.LEASE, lease.id)
        lease.forget_blocks()
        self._ended.add(lease.id, lease, now, lease.kept_bytes)

    def take_over(self, old: "LeaseTable", now: float) -> None:
        """Takes over the leases of a life that a defect ended, as LOST. Their blocks are forgotten, because the next
        life has other blocks.
        """
        for lease in old:
            gone = ContentId(lease.content.tokens, opaque=b"forgotten")
            lost = replace(lease, state=LeaseState.LOST, blocks=(), content=gone, checksums=())
            lost = replace(lost, accesses={}, waiting=set(), readers={})
            self._ended.add(lost.id, lost, now, lost.kept_bytes)
            self.ends[LeaseState.LOST] += 1

    @property
    def kept_bytes(self) -> dict[Hashable, int]:
        """Estimated bytes of each live lease, by id."""
        return {lease.id: lease.kept_bytes for lease in self._live.values()}

    @property
    def ended_bytes(self) -> int:
        """Estimated bytes of all ended leases."""
        return self._ended.nbytes

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._live.values())
