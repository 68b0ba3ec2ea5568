"""Answers to calls: each call is answered once, by a Reply or a Refuse with its id."""

from dataclasses import field

from kvgrpc.core.events import Opened
from kvgrpc.core.tables.accesses import Verdict
from kvgrpc.core.tables.leases import Lease, LeaseState, LeaseTimes
from kvgrpc.core.tables.transfers import Transfer
from kvgrpc.core.values.block_ids import Blocks, keeping
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.core.values.records import dataclass
from kvgrpc.core.values.sends import Values
from kvgrpc.errors import KVGrpcError, Reason


@dataclass(frozen=True, eq=False)
class HandedOver:
    """Answer to FinishedBlocks. `token` is empty for validate_only and pushes, `transfer` None for validate_only and
    GrantLease. For validate_only the lease has no id: it shows what would be granted.
    """

    lease: Lease
    """Its row as it was then. No event changes it, as a repeated call gets the same answer."""
    times: LeaseTimes
    transfer: Transfer | None
    token: bytes


@dataclass(frozen=True)
class GaveUp:
    """Answer to FinishedBlocks with a failure: the push that ended, or None when its key has no push yet."""

    transfer: Transfer | None


@dataclass(frozen=True)
class PushExpected:
    """Answer to FinishedBlocks with `expected`."""


@dataclass(frozen=True)
class Registered:
    """Answer to RegisterPush: the SEND transfer. None for validate_only when there is none yet."""

    transfer: Transfer | None


@dataclass(frozen=True)
class BlocksReserved:
    """Answer to ReserveBlocks: the RECEIVE transfer and the WRITE grant; None and empty for validate_only."""

    transfer: Transfer | None
    token: bytes


@dataclass(frozen=True)
class Widened:
    """Answer to PartsReady."""


@dataclass(frozen=True)
class PullStarted:
    """Answer to PullBlocks. `transfer` is None for validate_only, except by transfer id."""

    transfer: Transfer | None


@dataclass(frozen=True)
class Renewed:
    """Answer to RenewLeases, in the order asked. A renewed lease has the row (remaining_s, None, LIVE), a refused one
    (0, reason, state). The state of an unknown lease is None.
    """

    rows: tuple[tuple[float, Reason | None, LeaseState | None], ...]


@keeping("freed")
@dataclass(frozen=True, eq=False)
class Released:
    """Answer to ReleaseLease. For validate_only: the unchanged lease, and the blocks that would come free."""

    lease: Lease
    """Its row as in `HandedOver`."""
    times: LeaseTimes
    freed: Blocks


@dataclass(frozen=True)
class Cancelled:
    """Answer to CancelTransfer. `outcome` is one of the outcomes of `access.cancels`."""

    outcome: str
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True)
class QuarantineReleased:
    """Answer to ReleaseQuarantine: counts of blocks that left quarantine and that stayed. For validate_only: counts of
    blocks that the call would ask for, and of the others.
    """

    released: int
    left: int
    memory_generation: int


@dataclass(frozen=True)
class Checksums:
    """Answer to ChecksumBlocks: the checksums of each rank, as in `ChecksumsComputed.values`."""

    by_rank: tuple[bytes, ...]


@dataclass(frozen=True)
class SendUnderWay:
    """Answer to PostSend."""

    values: Values
    """The source rank's half of a process group that is being made, for the caller's rank."""


@dataclass(frozen=True)
class Acknowledged:
    """Answer to AcknowledgeTransfers."""

    count: int


@dataclass(frozen=True)
class DrainChanged:
    """Answer to StartDrain and CancelDrain."""

    draining: bool
    """True while the server takes no new work."""


@keeping("blocks")
@dataclass(frozen=True, eq=False)
class Allocated:
    """Answer to AllocateBlocks. For validate_only it has no id and no blocks."""

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
    """A lease that will be soft, unless it is claimed by then."""

    in_s: float
    block_counts: tuple[int, ...]
    """Blocks that its end alone would free, counted for each group in the group's block space."""


@keeping("freed")
@dataclass(frozen=True, eq=False)
class Reclaimed:
    """Answer to ReclaimBlocks. For validate_only: what would be reclaimed."""

    enough: bool
    """True if as many blocks came free as were needed; if False, nothing was reclaimed."""
    leases: tuple[ReclaimedLease, ...]
    """Reclaimed leases, oldest first; only the first ones of many."""
    lease_count: int
    """Number of all reclaimed leases."""
    freed: Blocks
    later: tuple[Later, ...]
    """Leases that will be soft, soonest first; only the first ones of many."""
    claimed: int = 0
    """Number of reclaimed leases that had waiting readers."""


@keeping("freed")
@dataclass(frozen=True, eq=False)
class Freed:
    """Answer to FreeBlocks: the blocks that nothing pins."""

    freed: Blocks


@dataclass(frozen=True)
class PeerConnected:
    """Answer to ConnectPeer: the peer's life. Empty for validate_only when a handshake would be needed."""

    life: str


@dataclass(frozen=True)
class Introduced:
    """Answer to a handshake that a peer began."""

    engine: EngineDescription
    """This engine when the endpoints were made; a later memory generation has other endpoints."""
    peer: EngineDescription
    """The engine of the caller."""
    endpoints: tuple[RankEndpoint, ...]
    protocol: int
    proof: bytes = field(default=b"", repr=False)
    """Proof that the peer must show here from now on."""


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
    """Answer to CloseAccess, row by row: True if the access was open until now."""

    rows: tuple[bool, ...]


_OfTransfer = HandedOver | GaveUp | PushExpected | Registered | BlocksReserved | Widened | PullStarted | Cancelled
_OfBlocks = Renewed | Released | Acknowledged | Allocated | Freed | Reclaimed | QuarantineReleased | DrainChanged
_ToPeer = PeerConnected | Introduced | Openings | Verdicts | Closings | Checksums | SendUnderWay
Answer = _OfTransfer | _OfBlocks | _ToPeer


@dataclass(frozen=True, eq=False)
class Reply:
    """Answers a call."""

    call_id: int
    answer: Answer
    event_seq: int
    """Number of the last transfer change before the answer; the answer shows no later change."""


@dataclass(frozen=True)
class Refuse:
    """Answers a call with an error; nothing has changed."""

    call_id: int
    error: KVGrpcError
