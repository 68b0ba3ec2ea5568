"""Everything a node asks of the world. Frozen values; the shell performs them in order and reports back as events.

What it asks of its ranks is in `rank_actions`; all actions can be imported from here.
"""

from dataclasses import dataclass

from kvgrpc.core.accesses import Opening, Verdict
from kvgrpc.core.compatibility import EngineDescription
from kvgrpc.core.endpoints import RankEndpoint
from kvgrpc.core.events import Closing, LayerRange, Opened, ReadyPart, Settling
from kvgrpc.core.leases import LeaseState
from kvgrpc.core.peers import PeerView
from kvgrpc.core.pins import Blocks
from kvgrpc.core.rank_actions import AwaitEnd, Expect, MakeOffer, MapPeer, Post, Rekey, Sum, UnmapPeer
from kvgrpc.core.transfers import Failure, Transfer
from kvgrpc.errors import KVGrpcError, Reason


@dataclass(frozen=True, eq=False)
class LeaseView:
    """A lease as it was at one moment."""

    id: str
    state: LeaseState
    request_id: str
    transfer_id: str
    ttl_s: float
    remaining_s: float
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
    """Answer to FinishedBlocks. `token` is empty for validate_only and pushes, `transfer` None for GrantLease."""

    lease: LeaseView
    transfer: Transfer | None
    token: bytes


@dataclass(frozen=True)
class GaveUp:
    """Answer to FinishedBlocks with a failure: the push has ended; None when there was none under that key yet."""

    transfer: Transfer | None


@dataclass(frozen=True)
class Registered:
    """Answer to RegisterPush: the SEND transfer."""

    transfer: Transfer


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
    """Answer to PullBlocks; None for validate_only."""

    transfer: Transfer | None


@dataclass(frozen=True)
class Renewed:
    """Answer to RenewLeases: (remaining_s, None) or (0, why not), in the order asked."""

    rows: tuple[tuple[float, Reason | None], ...]


@dataclass(frozen=True, eq=False)
class Released:
    """Answer to ReleaseLease."""

    lease: LeaseView
    freed: Blocks


@dataclass(frozen=True)
class Cancelled:
    """Answer to CancelTransfer. `outcome` is a CancelOutcome of the core."""

    outcome: str
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True)
class QuarantineReleased:
    """Answer to ReleaseQuarantine: blocks that came out of quarantine, and that stayed."""

    released: int
    left: int
    memory_generation: int


@dataclass(frozen=True)
class Checksums:
    """Answer to ChecksumBlocks: of each rank, as in Summed."""

    by_rank: tuple[bytes, ...]


@dataclass(frozen=True)
class Acknowledged:
    """Answer to AcknowledgeTransfers."""

    count: int


@dataclass(frozen=True, eq=False)
class Allocated:
    """Answer to AllocateBlocks."""

    allocation_id: str
    blocks: Blocks
    remaining_s: float | None


@dataclass(frozen=True, eq=False)
class Freed:
    """Answer to FreeBlocks."""

    freed: Blocks


@dataclass(frozen=True)
class PeerConnected:
    """Answer to ConnectPeer."""

    peer: PeerView


@dataclass(frozen=True)
class Introduced:
    """Answer to a received handshake."""

    engine: EngineDescription
    """This one, as it was when the endpoints were made: a later memory generation has others."""
    endpoints: tuple[RankEndpoint, ...]
    protocol: int


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
    HandedOver | GaveUp | Registered | Reserved | Widened | Pulling | Renewed | Released | Cancelled | Acknowledged
    | Allocated | Freed | PeerConnected | Introduced | Openings | Verdicts | Closings | QuarantineReleased | Checksums
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


@dataclass(frozen=True)
class Dial:
    """Handshake with the lead at an address: answered by PeerAnswered or DialFailed."""

    address: str
    expected_engine_id: str
    endpoints: tuple[RankEndpoint, ...]
    trace: str


@dataclass(frozen=True)
class HangUp:
    """Forget a peer's channel."""

    peer: str


@dataclass(frozen=True)
class SendOpen:
    """OpenAccess at a peer: answered by AccessAnswered."""

    peer: str
    opening: Opening
    trace: str


@dataclass(frozen=True)
class SendSettle:
    """SettleAccess at a peer: answered by SettleAnswered."""

    peer: str
    settling: Settling
    trace: str


@dataclass(frozen=True)
class SendClose:
    """CloseAccess at a peer: answered by CloseAnswered."""

    peer: str
    closing: Closing
    incarnation: int
    """Our life that opened the access: a lead closes the accesses of its earlier lives."""
    trace: str
    proves: bool = False
    """It says that nothing of ours writes there any more: blocks of the peer may wait for that."""


@dataclass(frozen=True)
class SendRegister:
    """RegisterPush at the lead of a push's source: answered by RegisterAnswered."""

    peer: str
    transfer_id: str
    """Ours."""
    token: bytes
    request_id: str
    trace: str


@dataclass(frozen=True, eq=False)
class SendParts:
    """PartsReady at the destination of a push: answered by PartsAnswered."""

    peer: str
    access_id: bytes
    parts: tuple[ReadyPart, ...]
    trace: str


@dataclass(frozen=True, eq=False)
class SendChecksums:
    """ChecksumBlocks at a peer: answered by ChecksumsAnswered."""

    peer: str
    access_id: bytes
    name: str
    number: int
    """Of this name's calls: one asks for some of its blocks."""
    blocks: tuple[tuple[Blocks, LayerRange | None], ...]
    trace: str


@dataclass(frozen=True)
class SendRenew:
    """RenewLeases at a peer, one row a transfer (transfer id, grant token): answered by RenewAnswered for each."""

    peer: str
    rows: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True)
class TransferChanged:
    """For watchers, waiters and traces."""

    transfer: Transfer


@dataclass(frozen=True)
class PullOpened:
    """For the engine: how many tokens a pull will bring that waits for its blocks."""

    transfer_id: str
    request_id: str
    use_tokens: int


@dataclass(frozen=True)
class Received:
    """For the engine: the KV is there and the blocks are its own."""

    transfer_id: str
    request_id: str
    use_tokens: int


@dataclass(frozen=True)
class Failed:
    """For the engine: it is over without success. Returns nothing."""

    transfer_id: str
    request_id: str
    failure: Failure
    cancelled: bool


@dataclass(frozen=True)
class BlocksReturned:
    """For the engine: the blocks of a transfer are its own again."""

    transfer_id: str
    """Empty for GrantLease, which makes no transfer."""
    request_id: str
    lease_id: str = ""
    """The lease that ended, where the blocks were handed over."""


@dataclass(frozen=True)
class PartsReturned:
    """For the engine: the blocks of parts that were replaced are its own again. Their push goes on."""

    transfer_id: str
    request_id: str
    lease_id: str
    """The lease that ended."""


@dataclass(frozen=True)
class LayersReceived:
    """For the engine: all blocks of these layers are there, provisionally: nothing computed from them leaves the
    engine before Received. Each one replaces the last: one with fewer layers says that the prefill started over, and
    that what was computed from the others is to be discarded. Failed discards all.
    """

    transfer_id: str
    request_id: str
    layers_done: tuple[LayerRange, ...]
    part_epoch: int


EngineNews = PullOpened | LayersReceived | Received | Failed | BlocksReturned | PartsReturned


@dataclass(frozen=True)
class WeightsUnknown:
    """For people: this life of a peer was admitted although nobody can tell whether its weights are the same."""

    peer: str


@dataclass(frozen=True)
class TellEngine:
    """Something for the attached engine."""

    news: EngineNews


Action = (
    Reply | Refuse | Dial | HangUp | SendOpen | SendSettle | SendClose | SendRegister | SendParts | SendRenew
    | MakeOffer | MapPeer | UnmapPeer | Post | Expect | AwaitEnd | Rekey | Sum | SendChecksums
    | TransferChanged | TellEngine | WeightsUnknown
)  # fmt: skip

__all__ = [
    "Acknowledged", "Action", "Allocated", "Answer", "AwaitEnd", "BlocksReturned", "Cancelled", "Checksums",
    "Closings", "Dial", "EngineNews", "Expect", "Failed", "Freed", "GaveUp", "HandedOver", "HangUp", "Introduced",
    "LayersReceived", "LeaseView", "MakeOffer", "MapPeer", "Openings", "PartsReturned", "PeerConnected", "Post",
    "PullOpened", "Pulling", "QuarantineReleased", "Received", "Refuse", "Registered", "Rekey", "Released",
    "Renewed", "Reply", "Reserved", "SendChecksums", "SendClose", "SendOpen", "SendParts", "SendRegister",
    "SendRenew", "SendSettle", "Sum", "TellEngine", "TransferChanged", "UnmapPeer", "Verdicts", "WeightsUnknown",
    "Widened",
]  # fmt: skip
