"""One pull at its destination: its stages as data, and what each kind of failure means.

CONNECTING   the peer's lead is being reached
OPENING      OpenAccess is under way at the source
OPEN         the source said which blocks; this side waits for its own blocks or its engine's step
WIRE         postings are in flight
SETTLING     all bytes are here; the source is asked whether they are the ones it granted
ENDED        the transfer is over; the object lives on while postings are in flight
"""

from dataclasses import dataclass, field
from enum import Enum

from kvgrpc.core.content import Claim
from kvgrpc.core.events import Opened
from kvgrpc.core.grants import Claims
from kvgrpc.core.pins import Blocks
from kvgrpc.core.timers import Timer
from kvgrpc.core.transfers import Failure, Next, Side
from kvgrpc.errors import Reason


class Stage(Enum):
    """Where a pull is."""

    # As in `timers.Timer`.
    __hash__ = object.__hash__

    CONNECTING = "handshake"
    OPENING = "open"
    OPEN = "queue"
    WIRE = "wire"
    SETTLING = "settle"
    ENDED = "ended"


STAGES: dict[Stage, frozenset[Stage]] = {
    Stage.CONNECTING: frozenset({Stage.OPENING, Stage.ENDED}),
    Stage.OPENING: frozenset({Stage.OPEN, Stage.CONNECTING, Stage.ENDED}),
    Stage.OPEN: frozenset({Stage.WIRE, Stage.SETTLING, Stage.ENDED}),
    Stage.WIRE: frozenset({Stage.SETTLING, Stage.ENDED}),
    Stage.SETTLING: frozenset({Stage.ENDED}),
    Stage.ENDED: frozenset(),
}
"""Which stage may follow which. The values are the names of the phases that people see."""

AT_ISSUER = (Stage.OPEN, Stage.WIRE, Stage.SETTLING)
"""While a pull is there its access is open at the source."""

NEXT_STEPS: dict[Reason, Next] = {
    Reason.CONTENT_MISMATCH: Next.FIX_REQUEST,
    Reason.CONTENT_RANGE: Next.FIX_REQUEST,
    Reason.CONTENT_REQUIRED: Next.FIX_REQUEST,
    Reason.GRANT_INVALID: Next.FIX_REQUEST,
    Reason.GRANT_FOREIGN: Next.FIX_REQUEST,
    Reason.GRANT_WRONG_ACCESS: Next.FIX_REQUEST,
    Reason.ACCESS_REUSED: Next.FIX_REQUEST,
    Reason.DIAL_REFUSED: Next.FIX_REQUEST,
    Reason.INCOMPATIBLE_POOLS: Next.RETRY_OTHER_CONSUMER,
    Reason.PROTOCOL_UNSUPPORTED: Next.RETRY_OTHER_CONSUMER,
    Reason.NO_DATA_PATH: Next.RETRY_OTHER_CONSUMER,
    Reason.PEER_UNREACHABLE: Next.RETRY_OTHER_CONSUMER,
    Reason.QUEUE_TIMEOUT: Next.RETRY_HERE,
    Reason.TRANSFER_TIMEOUT: Next.RETRY_HERE,
    Reason.SETTLE_TIMEOUT: Next.RETRY_HERE,
    Reason.DATA_PATH_FAILED: Next.RETRY_HERE,
    Reason.DEADLINE: Next.RETRY_HERE,
}
"""What would help after a failed pull; RECOMPUTE where nothing is listed."""

LOST_SOURCE = frozenset(
    {
        Reason.LEASE_EXPIRED,
        Reason.LEASE_RELEASED,
        Reason.LEASE_VOIDED,
        Reason.LEASE_NOT_FOUND,
        Reason.INCARNATION_CHANGED,
    }
)
"""Answers to a renewal that mean the blocks are gone."""


@dataclass(eq=False)
class Pull:
    """One pull at its destination."""

    transfer_id: str
    token: bytes
    claims: Claims
    claim: Claim
    access_id: bytes
    trace: str
    queue_timeout_s: float
    transfer_timeout_s: float
    after_step: int = 0
    stage: Stage = Stage.CONNECTING
    peer: str = ""
    destination: Blocks | None = None
    skip: list[int] = field(default_factory=list)
    """Blocks of each group that the destination holds already."""
    opened: Opened | None = None
    postings: set[str] = field(default_factory=set)
    """Those that may still access memory."""
    unproved: set[str] = field(default_factory=set)
    """Those of them that have ended, without proof that no access follows."""
    posted_at: float = 0.0
    nbytes: int = 0
    next_renewal: float = 0.0

    def move(self, stage: Stage) -> None:
        """Asserts that the table allows it."""
        assert stage in STAGES[self.stage], f"{self.stage} to {stage}"
        self.stage = stage

    @property
    def missing_proof(self) -> str:
        """What would prove its blocks at rest, for people."""
        flying = _ranks(self.postings - self.unproved)
        lost = _ranks(self.unproved)
        return "; ".join(
            [f"the end of the posting of rank {rank}" for rank in flying]
            + [
                f"that the posting of rank {rank}, which its data path lost, accesses nothing more: known at the end "
                "of the engine's life only"
                for rank in lost
            ]
        )

    @property
    def moves_nothing(self) -> bool:
        """Its engine has found everything locally."""
        return self.destination is not None and not any(len(ids) for ids in self.destination)


def posting_name(transfer_id: str, rank: int) -> str:
    """The posting of a rank for a transfer."""
    return f"{transfer_id}/{rank}"


def rank_of(posting_id: str) -> int:
    """The rank of a posting."""
    return int(posting_id.rpartition("/")[2])


def _ranks(postings: set[str]) -> list[int]:
    return sorted(map(rank_of, postings))


PULL_TIMERS = (
    Timer.BLOCKS,
    Timer.QUEUE,
    Timer.TRANSFER,
    Timer.SETTLE,
    Timer.SETTLE_RETRY,
    Timer.OPEN_RETRY,
    Timer.RENEW,
)

TIMEOUTS = {
    Timer.BLOCKS: (Reason.QUEUE_TIMEOUT, "no blocks were given for it within the cap of its lease"),
    Timer.QUEUE: (Reason.QUEUE_TIMEOUT, "it waited too long in phase {phase}"),
    Timer.TRANSFER: (Reason.TRANSFER_TIMEOUT, "the bytes took longer than the transfer timeout"),
    Timer.SETTLE: (Reason.SETTLE_TIMEOUT, "the source did not say in time whether the bytes are valid"),
}

OWN_FAILURES = frozenset(
    {
        Reason.QUEUE_TIMEOUT,
        Reason.TRANSFER_TIMEOUT,
        Reason.DATA_PATH_FAILED,
        Reason.DIAL_REFUSED,
        Reason.NO_DATA_PATH,
    }
)
"""Reasons that lie at the destination."""


def pull_failure(pull: Pull, reason: Reason, message: str, rank: int | None = None) -> Failure:
    """The failure of a pull in its present stage."""
    side = Side.DESTINATION if reason in OWN_FAILURES else Side.SOURCE
    return Failure(reason, message, pull.stage.value, side, rank, NEXT_STEPS.get(reason, Next.RECOMPUTE))
