"""What a node says to other leads; the shell brings back what they answer as events."""

from dataclasses import dataclass, field

from kvgrpc.core.events import Closing, ReadyPart, Settling
from kvgrpc.core.tables.accesses import Opening
from kvgrpc.core.values.calls import LayerRange
from kvgrpc.core.values.descriptors import Blocks
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.core.values.sends import SendAsk


@dataclass(frozen=True)
class Dial:
    """Handshake with the lead at an address: answered by PeerAnswered or DialFailed."""

    address: str
    expected_engine_id: str
    endpoints: tuple[RankEndpoint, ...]
    trace: str
    to: str = ""
    """Where to call it, if that is another address of the life that answers at this one."""
    proofs: tuple[bytes, ...] = field(default=(), repr=False)
    """What that life told this engine to show, once it has asked for it."""
    asks: bytes = field(default=b"", repr=False)
    """What it is told to show here; empty: to be drawn."""


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
    """The number of the call among those of this name: one call asks for some of its blocks."""
    blocks: tuple[tuple[Blocks, LayerRange | None], ...]
    trace: str


@dataclass(frozen=True, eq=False)
class SendPostSend:
    """PostSend at the source that a rank asks: answered by PostSendAnswered."""

    peer: str
    rank: int
    """Ours, which asks."""
    access_id: bytes
    """The access under which it reads; empty: it only meets the peer's rank."""
    ask: SendAsk
    trace: str
    incarnation: int
    """Of this life."""


@dataclass(frozen=True)
class SendRenew:
    """RenewLeases at a peer, one row a transfer (transfer id, grant token): answered by RenewAnswered for each."""

    peer: str
    rows: tuple[tuple[str, bytes], ...]
    reading: tuple[bytes, ...] = ()
    """Accesses that were opened without blocks, and under which bytes are read by now."""


@dataclass(frozen=True)
class SendRenewKeys:
    """RenewLeases at a peer, by transfer keys: answered by KeysRenewed."""

    peer: str
    keys: tuple[bytes, ...] = field(repr=False)
    ttl_s: float | None
    """None: that of each lease."""
    trace: str
