"""Answers to calls: each call is answered once, by a Reply or a Refuse with its id."""

from dataclasses import dataclass, field

from kvgrpc.core.events import Opened
from kvgrpc.core.tables.accesses import Verdict
from kvgrpc.core.tables.leases import LeaseState
from kvgrpc.core.tables.peers import PeerView
from kvgrpc.core.tables.transfers import Transfer
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.descriptors import Blocks
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.core.values.kept_blocks import keeping
from kvgrpc.core.values.sends import Values
from kvgrpc.errors import KVGrpcError, Reason


@keeping("blocks")
@dataclass(frozen=True, eq=False)
class LeaseView:
    """A lease as it was at one moment."""

    id: str
    state: LeaseState
    request_id: str
    transfer_id: str
    ttl_s: float
    remaining_s: float
    soft_in_s: float | None
    """In how long it may be taken back unless it is claimed, 0: now; None while it is claimed, or over."""
    cap_remaining_s: float
    age_s: float
    blocks: Blocks
    token_count: int
    consumers: int
    consumers_done: int
    open_accesses: int
    renewals: int
    trace: str
    labels: tuple[tuple[str, str], ...]


@dataclass(frozen=True, eq=False)
class HandedOver:
    """Answer to FinishedBlocks. `token` is empty for validate_only and pushes, `transfer` None for validate_only and
    GrantLease. For validate_only the lease has no id: it shows what would be granted.
    """

    lease: LeaseView
    transfer: Transfer | None
    token: bytes


@dataclass(frozen=True)
class GaveUp:
    """Answer to FinishedBlocks with a failure: the push has ended; None when there was none under that key yet."""

    transfer: Transfer | None


@dataclass(frozen=True)
class Expected:
    """Answer to FinishedBlocks for what is to come."""


@dataclass(frozen=True)
class Registered:
    """Answer to RegisterPush: the SEND transfer. None for validate_only where there is none yet."""

    transfer: Transfer | None


@dataclass(frozen=True)
class Reserved:
    """Answer to ReserveBlocks: the RECEIVE transfer and the WRITE grant; None and empty for validate_only."""

    transfer: Transfer | None
    token: bytes


@dataclass(frozen=True)
class Widened:
    """Answer to PartsReady."""


@dataclass(frozen=True)
class Pulling:
    """Answer to PullBlocks; None for validate_only, but by transfer id."""

    transfer: Transfer | None


@dataclass(frozen=True)
class Renewed:
    """Answer to RenewLeases, in the order asked: (remaining_s, None, LIVE), or (0, why not, its state), which is None
    for a lease that is not known.
    """

    rows: tuple[tuple[float, Reason | None, LeaseState | None], ...]


@keeping("freed")
@dataclass(frozen=True, eq=False)
class Released:
    """Answer to ReleaseLease; for validate_only the lease as it is, and the blocks that would come free."""

    lease: LeaseView
    freed: Blocks


@dataclass(frozen=True)
class Cancelled:
    """Answer to CancelTransfer. `outcome` is a CancelOutcome of the core."""

    outcome: str
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True)
class QuarantineReleased:
    """Answer to ReleaseQuarantine: blocks that came out of quarantine, and that stayed. For validate_only those that
    would be asked for, and the others.
    """

    released: int
    left: int
    memory_generation: int


@dataclass(frozen=True)
class Checksums:
    """Answer to ChecksumBlocks: of each rank, as in Summed."""

    by_rank: tuple[bytes, ...]


@dataclass(frozen=True)
class SendUnderWay:
    """Answer to PostSend."""

    values: Values
    """Of a process group that is being made: what the caller's rank has to know."""


@dataclass(frozen=True)
class Acknowledged:
    """Answer to AcknowledgeTransfers."""

    count: int


@dataclass(frozen=True)
class Drained:
    """Answer to Drain: what is still going on."""

    transfers: int
    """That are not over."""
    leases: int
    quarantined_blocks: int
    oldest_transfer_id: str
    """Of those that are not over; empty when all are."""


@keeping("blocks")
@dataclass(frozen=True, eq=False)
class Allocated:
    """Answer to AllocateBlocks; for validate_only without id and blocks."""

    allocation_id: str
    blocks: Blocks
    remaining_s: float | None


@dataclass(frozen=True)
class ReclaimedLease:
    """A lease that was reclaimed."""

    lease_id: str
    transfer_id: str
    """Empty for GrantLease."""
    request_id: str


@dataclass(frozen=True)
class Later:
    """A lease that will be soft, if nobody claims it."""

    in_s: float
    block_counts: tuple[int, ...]
    """Blocks that would come free with it alone: for each group those of its block space."""


@keeping("freed")
@dataclass(frozen=True, eq=False)
class Reclaimed:
    """Answer to ReclaimBlocks; for validate_only what would be reclaimed."""

    enough: bool
    """Whether as many blocks came free as were needed; else nothing was reclaimed."""
    leases: tuple[ReclaimedLease, ...]
    """Oldest first; the first ones of many."""
    lease_count: int
    """All of them."""
    freed: Blocks
    later: tuple[Later, ...]
    """In the order of time; the first ones of many."""
    claimed: int = 0
    """How many of the leases had readers that waited."""


@keeping("freed")
@dataclass(frozen=True, eq=False)
class Freed:
    """Answer to FreeBlocks: those that nothing pins."""

    freed: Blocks


@dataclass(frozen=True)
class PeerConnected:
    """Answer to ConnectPeer; None for validate_only where a handshake would be needed."""

    peer: PeerView | None


@dataclass(frozen=True)
class Introduced:
    """Answer to a received handshake."""

    engine: EngineDescription
    """This one, as it was when the endpoints were made: a later memory generation has others."""
    endpoints: tuple[RankEndpoint, ...]
    protocol: int
    proof: bytes = field(default=b"", repr=False)
    """What the peer shows here from now on."""


@dataclass(frozen=True)
class Openings:
    """Answer to OpenAccess, row by row."""

    rows: tuple[Opened | KVGrpcError, ...]


@dataclass(frozen=True)
class Verdicts:
    """Answer to SettleAccess, row by row."""

    rows: tuple[Verdict, ...]


@dataclass(frozen=True)
class Closings:
    """Answer to CloseAccess, row by row: whether it was open until now."""

    rows: tuple[bool, ...]


Answer = (
    HandedOver | GaveUp | Expected | Registered | Reserved | Widened | Pulling | Renewed | Released | Cancelled
    | Acknowledged | Allocated | Freed | PeerConnected | Introduced | Openings | Verdicts | Closings
    | QuarantineReleased | Checksums | Drained | Reclaimed | SendUnderWay
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Reply:
    """Answers a call."""

    call_id: int
    answer: Answer
    event_seq: int
    """Number of the last change of a transfer when the answer was made: it tells of none after that."""


@dataclass(frozen=True)
class Refuse:
    """Answers a call with an error; nothing has changed."""

    call_id: int
    error: KVGrpcError
