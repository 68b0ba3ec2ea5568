"""Accesses at the issuer: grants in use by peers.

    WAITING   for its lease, a step, the mirrors, liveness or our postings; nothing was promised yet
    OPEN      the peer may read; it pins
    STALE     the lease (or memory, or incarnation) ended under it: the peer's reads are not vouched for
    CLOSED    over; its verdict is kept for the settle timeout so that a lost reply can be requested again. An access
              that never opened is a tombstone, kept for the registration timeout. The ids of the others are kept as
              long, so that a late message does not open them again

The table is no `remembered.Remembered`: a full one refuses new accesses and forgets no closed one early.

A verdict is given once and never changes.
"""

from collections.abc import Sequence
from dataclasses import field
from enum import Enum

from kvgrpc.core.values.call import ReadyPart
from kvgrpc.core.values.content import ContentClaim, ContentId
from kvgrpc.core.values.grants import AccessKind
from kvgrpc.core.values.records import dataclass
from kvgrpc.errors import Reason

ACCESS_BYTES = 3_100
"""Estimated bytes of an access without the texts, content and parts of its opening: its pin, its deadlines and its row
in the ledger.
"""
PART_BYTES = 600
"""Estimated bytes of a group's blocks in a part, without their ids."""


class CloseOutcome(Enum):
    """The meaning of a close, as stated by the closing side."""

    # Hashes by identity, as `timers.Timer` does.
    __hash__ = object.__hash__

    DROPPED = "dropped"
    """The consumer will not come again. It counts as done if the grant says so."""
    FAILED = "failed"
    """The consumer did not get the KV and does not count. It or another one may try again."""
    CANCELLED = "cancelled"
    """The consumer and its request were cancelled. It counts as done. The transfer of the side that is told ends
    CANCELLED, at once if this is its only consumer.
    """


class AccessState(Enum):
    """The states of an access."""

    WAITING = "waiting"
    OPEN = "open"
    STALE = "stale"
    CLOSED = "closed"


STATES: dict[AccessState, frozenset[AccessState]] = {
    AccessState.WAITING: frozenset({AccessState.OPEN, AccessState.CLOSED}),
    AccessState.OPEN: frozenset({AccessState.STALE, AccessState.CLOSED}),
    AccessState.STALE: frozenset({AccessState.CLOSED}),
    AccessState.CLOSED: frozenset(),
}


@dataclass(frozen=True)
class Verdict:
    """The answer to a settle."""

    valid: bool
    reason: Reason | None = None
    message: str = ""


@dataclass(frozen=True)
class AccessOpening:
    """One row of OpenAccess: the request of a peer."""

    access_id: bytes
    token: bytes
    claim: ContentClaim | None
    transfer_id: str = ""
    request_id: str = ""
    data_paths: tuple[str, ...] = ()
    reverse_access_id: bytes = b""
    """WRITE: the READ access that the opener holds on its own lease for the issuer, which then moves the bytes. Empty
    when the opener writes.
    """
    push_content: ContentId | None = None
    """WRITE: the content of the whole prompt."""
    part_epoch: int = 0
    """WRITE: the epoch of the parts that move under this access. A higher one replaces parts under earlier accesses."""
    parts: tuple[ReadyPart, ...] = ()
    """WRITE moved by the issuer: the parts that it may read at once."""
    waits_for_blocks: bool = False
    """READ: the opener has no blocks to read into yet."""
    request_time_us: int = 0
    """READ: begin time of the opener's request, in microseconds. 0 means that of the lease."""


@dataclass(eq=False)
class Access:
    """One access at its issuer."""

    opening: AccessOpening
    consumer: str
    """The consumer's engine id."""
    peer: str
    """The consumer's life."""
    lease_id: str
    """The lease that it reads, or the target that it fills."""
    since: float
    state: AccessState = AccessState.WAITING
    stale: Reason | None = None
    verdict: Verdict | None = None
    waiting_for: str = ""
    """The condition that a WAITING access misses: lease, step, liveness, postings, copy."""
    kind: AccessKind = AccessKind.READ
    tokens: int = 0
    """Number of tokens that may be read or filled, once it is known that both sides mean the same content."""
    settled: int = 0
    """Number of parts settled under it."""
    outcome: CloseOutcome = CloseOutcome.FAILED
    """Outcome of its close, unless it was closed after a success."""
    pinned_bytes: int = 0
    """Estimated bytes of the blocks that it pins or has pinned."""
    why: str = ""
    """Message that came with its close."""
    waits_for_blocks: bool = field(init=False)
    """True until its opener says that it has blocks to read into."""
    id: bytes = field(init=False)
    owner: str = field(init=False)
    """The access's name in the pin table."""

    def __post_init__(self) -> None:
        self.id, self.waits_for_blocks = self.opening.access_id, self.opening.waits_for_blocks
        self.owner = pin_owner(self.id)

    @property
    def kept_bytes(self) -> int:
        """Estimated bytes of this row."""
        asked = self.opening
        nbytes = ACCESS_BYTES + len(asked.token) + len(asked.transfer_id) + len(asked.request_id) + self.pinned_bytes
        if asked.push_content is not None:
            nbytes += len(asked.push_content.digests)
        if asked.claim is not None:
            nbytes += len(asked.claim.prefix)
        return nbytes + parts_bytes(asked.parts) if asked.parts else nbytes

    def move(self, state: AccessState) -> None:
        """Changes the state. Asserts that `STATES` allows it."""
        assert state in STATES[self.state], f"{self.state} to {state}"
        self.state = state

    @property
    def held(self) -> bool:
        """True while it is open or stale."""
        return self.state in (AccessState.OPEN, AccessState.STALE)


def pin_owner(access_id: bytes) -> str:
    """Returns an access's name among pin owners and in logs."""
    return f"a-{access_id.hex()}"


def parts_bytes(parts: Sequence[ReadyPart]) -> int:
    """Estimates the bytes of parts as their source states them."""
    return sum([PART_BYTES + 8 * len(ids) for part in parts for _, ids in part.blocks])
