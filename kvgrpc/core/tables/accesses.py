"""Accesses at the issuer: grants in use by peers.

    WAITING   for its lease to be announced or for the engine's step; nothing was promised yet
    OPEN      the peer may read; it pins
    STALE     the lease (or memory, or incarnation) ended under it: whatever the peer read is not vouched for
    CLOSED    over; its verdict is kept for the settle timeout so that a lost reply can be asked for again. One that
              never opened is a tombstone, kept for the registration timeout. Of the others the id is remembered as
              long, so that a message that was long under way does not open them again

A verdict is given once and never changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvgrpc.core.values.calls import ReadyPart
from kvgrpc.core.values.content import Claim, Content
from kvgrpc.core.values.grants import Access as Kind
from kvgrpc.errors import Reason

ACCESS_BYTES = 3_100
"""Of one, without the texts, the content and the parts of its opening: with its pin, its deadlines, and its row in
the ledger.
"""
PART_BYTES = 600
"""Of a group's blocks in a part, without their ids."""


class CloseOutcome(Enum):
    """What the closing of an access means, as the side says that closes it."""

    # As in `timers.Timer`.
    __hash__ = object.__hash__

    DROPPED = "dropped"
    """This consumer will not come again: it counts as done, if the grant says so."""
    FAILED = "failed"
    """It did not get the KV and does not count: another may try, or the same one."""
    CANCELLED = "cancelled"
    """It was cancelled, and so is the request: it counts as done, and the transfer of the side that hears it ends
    CANCELLED, at once if it is of this consumer alone.
    """


class AccessState(Enum):
    """The life of an access."""

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
    """What settling an access answered."""

    valid: bool
    reason: Reason | None = None
    message: str = ""


@dataclass(frozen=True)
class Opening:
    """One row of OpenAccess: what a peer asks for."""

    access_id: bytes
    token: bytes
    claim: Claim | None
    transfer_id: str = ""
    request_id: str = ""
    data_paths: tuple[str, ...] = ()
    reverse_access_id: bytes = b""
    """WRITE: the READ access that the opener holds on its own lease for the issuer, which then moves the bytes; empty:
    the opener writes."""
    push_content: Content | None = None
    """WRITE: the content of the whole prompt."""
    part_epoch: int = 0
    """WRITE: of the parts that move under this access. A higher one replaces what moved under earlier accesses."""
    parts: tuple[ReadyPart, ...] = ()
    """WRITE that the issuer moves: the parts that it may read at once."""
    waits_for_blocks: bool = False
    """READ: the opener has no blocks to read into yet."""
    request_time_us: int = 0
    """READ: when the opener's request began; 0: when that of the lease did."""


@dataclass(eq=False)
class Access:
    """One access at its issuer."""

    opening: Opening
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
    """What a WAITING access misses: lease, step, liveness, postings."""
    kind: Kind = Kind.READ
    tokens: int = 0
    """Those that may be read, or filled, under it, once it is known that both sides mean the same."""
    settled: int = 0
    """How many parts were settled under it."""
    outcome: CloseOutcome = CloseOutcome.FAILED
    """What its closing meant, where it was not closed after a success."""
    pinned_bytes: int = 0
    """Of the blocks that it pins, or has pinned."""
    why: str = ""
    """What was said when it was closed, as text."""
    waits_for_blocks: bool = field(init=False)
    """Its opener has not said yet that it has blocks to read into."""

    def __post_init__(self) -> None:
        self.waits_for_blocks = self.opening.waits_for_blocks

    @property
    def id(self) -> bytes:
        return self.opening.access_id

    @property
    def owner(self) -> str:
        """Its name in the pin table."""
        return pin_owner(self.opening.access_id)

    @property
    def kept_bytes(self) -> int:
        """What it weighs."""
        asked = self.opening
        nbytes = ACCESS_BYTES + len(asked.token) + len(asked.transfer_id) + len(asked.request_id) + self.pinned_bytes
        if asked.push_content is not None:
            nbytes += len(asked.push_content.digests)
        if asked.claim is not None:
            nbytes += len(asked.claim.prefix)
        return nbytes + parts_bytes(asked.parts) if asked.parts else nbytes

    def move(self, state: AccessState) -> None:
        """Asserts that the table allows it."""
        assert state in STATES[self.state], f"{self.state} to {state}"
        self.state = state

    @property
    def held(self) -> bool:
        """Neither waiting nor over."""
        return self.state in (AccessState.OPEN, AccessState.STALE)


def pin_owner(access_id: bytes) -> str:
    """An access's name among pin owners and in logs."""
    return f"a-{access_id.hex()}"


def parts_bytes(parts: Sequence[ReadyPart]) -> int:
    """What parts weigh as their source tells them."""
    return sum([PART_BYTES + 8 * len(ids) for part in parts for _, ids in part.blocks])
