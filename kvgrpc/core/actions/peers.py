"""Messages from a node to other leads; the shell returns their answers as events."""

from dataclasses import field

from kvgrpc.core.events import AccessClosing, AccessSettling, ReadyPart
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.call import LayerRange
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.core.values.records import dataclass
from kvgrpc.core.values.sends import SendAsk

CLOSE_BYTES = 1_200
"""Estimated bytes of an unanswered close without its texts: its deadline, its indexes, and a close that follows it."""


@dataclass(frozen=True)
class Dial:
    """Shakes hands with the lead at an address: answered by PeerAnswered or DialFailed."""

    address: str
    expected_engine_id: str
    endpoints: tuple[RankEndpoint, ...]
    trace: str
    to: str = ""
    """Address to call if it differs: another address of the life that answers at `address`."""
    proofs: tuple[bytes, ...] = field(default=(), repr=False)
    """Proofs to show to that life: earlier ones that it asked for."""
    asks: bytes = field(default=b"", repr=False)
    """Proof that the peer must show here; empty: the shell draws one."""


@dataclass(frozen=True)
class HangUp:
    """Closes a peer's channel."""

    peer: str


@dataclass(frozen=True)
class SendOpen:
    """Calls OpenAccess at a peer: answered by AccessAnswered."""

    peer: str
    opening: AccessOpening
    trace: str


@dataclass(frozen=True)
class SendSettle:
    """Calls SettleAccess at a peer: answered by SettleAnswered."""

    peer: str
    settling: AccessSettling
    trace: str


@dataclass(frozen=True)
class SendClose:
    """Calls CloseAccess at a peer: answered by CloseAnswered."""

    peer: str
    closing: AccessClosing
    incarnation: int
    """Our life that opened the access: a lead closes the accesses of its earlier lives."""
    trace: str
    proves: bool = False
    """The closing proves that nothing of ours writes there any more; blocks of the peer may wait for this proof."""

    @property
    def kept_bytes(self) -> int:
        """Estimated bytes of a close that waits, with its deadline and the close that follows it."""
        return CLOSE_BYTES + len(self.closing.token) + len(self.closing.message)


@dataclass(frozen=True)
class SendRegister:
    """Calls RegisterPush at the lead of a push's source: answered by RegisterAnswered."""

    peer: str
    transfer_id: str
    """Our transfer."""
    token: bytes
    request_id: str
    trace: str


@dataclass(frozen=True, eq=False)
class SendParts:
    """Calls PartsReady at the destination of a push: answered by PartsAnswered."""

    peer: str
    access_id: bytes
    parts: tuple[ReadyPart, ...]
    trace: str


@dataclass(frozen=True, eq=False)
class SendChecksums:
    """Calls ChecksumBlocks at a peer: answered by ChecksumsAnswered."""

    peer: str
    access_id: bytes
    name: str
    number: int
    """Number of this call among the calls of the same name: each asks for some of the blocks."""
    blocks: tuple[tuple[Blocks, LayerRange | None], ...]
    trace: str


@dataclass(frozen=True, eq=False)
class SendPostSend:
    """Calls PostSend at the source that a rank asks: answered by PostSendAnswered."""

    peer: str
    rank: int
    """Our rank that asks."""
    access_id: bytes
    """The access under which the rank reads; empty: it only makes a process group with the peer's rank."""
    ask: SendAsk
    trace: str
    incarnation: int
    """Our life that asks."""


@dataclass(frozen=True)
class SendRenew:
    """Calls RenewLeases at a peer, with rows (transfer id, grant token): each row is answered by RenewAnswered."""

    peer: str
    rows: tuple[tuple[str, bytes], ...]
    reading: tuple[bytes, ...] = ()
    """Accesses that were opened without blocks and under which bytes are now read."""


@dataclass(frozen=True)
class SendRenewKeys:
    """Calls RenewLeases at a peer, by transfer keys: answered by KeysRenewed."""

    peer: str
    keys: tuple[bytes, ...] = field(repr=False)
    ttl_s: float | None
    """TTL in seconds; None: each lease's own."""
    trace: str
