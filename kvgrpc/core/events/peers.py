"""What other leads do and answer."""

from dataclasses import dataclass, field

from kvgrpc.core.tables.accesses import CloseOutcome, Opening, Verdict
from kvgrpc.core.values.calls import BlockLists, Call, LayerRange, ReadyPart
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.core.values.kept_blocks import keeping_lists
from kvgrpc.core.values.sends import SendAnswer, SendAsk
from kvgrpc.errors import KVGrpcError


@dataclass(frozen=True)
class HandshakeReceived:
    """A peer introduces itself."""

    call: Call
    peer: EngineDescription
    endpoints: tuple[RankEndpoint, ...]
    expected_engine_id: str = ""
    shows: bytes = field(default=b"", repr=False)
    """What the peer tells this engine to show it."""
    asks: bytes = field(default=b"", repr=False)
    """Drawn for this call: what the peer is told to show here, unless it has shown what it was told before."""
    proofs: tuple[bytes, ...] = field(default=(), repr=False)
    """What it says that it was told before."""


@dataclass(frozen=True)
class PeerAnswered:
    """The peer at a dialled address answered the handshake, and its liveness stream stands."""

    address: str
    peer: EngineDescription
    endpoints: tuple[RankEndpoint, ...]
    shows: bytes = field(default=b"", repr=False)
    """What the peer told this engine to show there."""
    asks: bytes = field(default=b"", repr=False)
    """What the peer was told to show here."""


@dataclass(frozen=True)
class DialFailed:
    """The handshake with an address failed."""

    address: str
    error: KVGrpcError


@dataclass(frozen=True)
class PeerAlive:
    """A liveness stream with that life of a peer stands (again)."""

    peer: str
    proof: bytes = field(default=b"", repr=False)
    """What the other end of the stream has shown."""


@dataclass(frozen=True)
class PeerSilent:
    """The liveness stream broke or fell silent."""

    peer: str


@dataclass(frozen=True)
class ProofRefused:
    """That life of a peer does not take what this engine shows it, for a call that is made again later."""

    peer: str


@dataclass(frozen=True)
class OpenAccess:
    """A peer opens accesses here."""

    call: Call
    engine_id: str
    incarnation: int
    openings: tuple[Opening, ...]


@dataclass(frozen=True)
class Settling:
    """One row of SettleAccess."""

    access_id: bytes
    last: bool
    nbytes: int = 0
    """Moved under the access since its last settling."""
    part: int = 0
    """The last part that is settled, counted from 0 within the access; all before it are settled with it."""
    layers_done: tuple[LayerRange, ...] = ()
    """From a source that writes: the layers of which every block is there."""


@dataclass(frozen=True)
class SettleAccess:
    """A peer settles accesses here."""

    call: Call
    engine_id: str
    incarnation: int
    settlings: tuple[Settling, ...]


@dataclass(frozen=True)
class Closing:
    """One row of CloseAccess: of an access that the caller opened here, or, with CANCELLED, of one that this engine
    opened there.
    """

    access_id: bytes
    outcome: CloseOutcome
    quiesced: bool
    """The closing side's movers are proved at rest. Without it the closing proves nothing about a WRITE access."""
    token: bytes = b""
    """The grant that the access stands on, so that the closing of one that was never opened is understood. With a WRITE
    grant a source that opened nothing yet says that it cannot deliver.
    """
    message: str = ""
    """Why, as text."""


@dataclass(frozen=True)
class CloseAccess:
    """A peer closes accesses here."""

    call: Call
    engine_id: str
    incarnation: int
    closings: tuple[Closing, ...]


@dataclass(frozen=True, eq=False)
class PartsReady:
    """A source widens the READ access that it opened for this engine: answered by Widened.

    Idempotent: parts that are known already are skipped; one that is missing before them refuses the call.
    """

    call: Call
    engine_id: str
    incarnation: int
    access_id: bytes
    """The WRITE access that the source opened here."""
    parts: tuple[ReadyPart, ...]


@keeping_lists("blocks")
@dataclass(frozen=True, eq=False)
class Opened:
    """What an issuer answered to an opening.

    To the opening of a WRITE grant: the target's blocks, which are the last ones of each group up to `token_count`; the
    ones before are held already. `lease_id` is the target's, `ttl_s` the registration timeout.
    """

    blocks: BlockLists
    token_count: int
    offer_tokens: int
    remaining_s: float
    ttl_s: float
    memory_generation: int
    transfer_id: str = ""
    lease_id: str = ""


@dataclass(frozen=True, eq=False)
class AccessAnswered:
    """The issuer answered our opening; an error that `retryable` may pass is asked again."""

    access_id: bytes
    result: Opened | KVGrpcError
    retryable: bool = False


@dataclass(frozen=True)
class SettleAnswered:
    """The issuer gave its verdict; an error may be asked again until the settle deadline."""

    access_id: bytes
    result: Verdict | KVGrpcError
    retryable: bool = False


@dataclass(frozen=True)
class CloseAnswered:
    """The issuer knows that our access is closed, or the call failed."""

    access_id: bytes
    answered: bool
    """Also true for NO_HANDSHAKE: a peer that does not know this engine has no access of it."""
    quiesced: bool = True
    """Whether the closing that this answers said that its caller is at rest."""


@dataclass(frozen=True)
class PartsAnswered:
    """The destination knows of the parts of one SendParts, or not; a `retryable` error is asked again."""

    access_id: bytes
    error: KVGrpcError | None
    retryable: bool = False


@dataclass(frozen=True)
class RegisterAnswered:
    """The source of a push knows of its registration, or refused it; a `retryable` error is asked again."""

    transfer_id: str
    """Ours."""
    error: KVGrpcError | None
    retryable: bool = False


@dataclass(frozen=True, eq=False)
class ChecksumBlocks:
    """A peer asks for the checksums of blocks that it reads."""

    call: Call
    engine_id: str
    incarnation: int
    access_id: bytes
    blocks: tuple[tuple[BlockLists, LayerRange | None], ...]
    """Block ids of this engine; of these layers, or of all."""


@dataclass(frozen=True, eq=False)
class PostSend:
    """A peer asks a rank of this engine to send what it reads."""

    call: Call
    engine_id: str
    incarnation: int
    access_id: bytes
    ask: SendAsk


@dataclass(frozen=True)
class PostSendAnswered:
    """What came of a PostSend of one of our ranks."""

    rank: int
    peer: str
    answer: SendAnswer
    incarnation: int = 0
    """Of our life that asked; 0: not known."""


@dataclass(frozen=True)
class CallAbandoned:
    """The caller does not wait for its answer any more: it gave up, its deadline is over, or its connection is gone."""

    call_id: int


@dataclass(frozen=True)
class ChecksumsAnswered:
    """The source's checksums of what a round reads, or of some of it; a `retryable` error is asked again."""

    name: str
    number: int
    result: tuple[bytes, ...] | KVGrpcError
    """For each rank, as in ChecksumsComputed."""
    retryable: bool = False


@dataclass(frozen=True)
class RenewAnswered:
    """The issuer renewed, or refused, the lease of one of our pulls."""

    transfer_id: str
    error: KVGrpcError | None


@dataclass(frozen=True)
class KeysRenewed:
    """The source renewed what it has under keys (key, what is left); those that it knows nothing of are not listed."""

    peer: str
    rows: tuple[tuple[bytes, float], ...]


PeerRequest = OpenAccess | SettleAccess | CloseAccess | PartsReady | ChecksumBlocks | PostSend
"""What a life of a peer asks for."""

__all__ = [
    "AccessAnswered",
    "CallAbandoned",
    "ChecksumBlocks",
    "ChecksumsAnswered",
    "CloseAccess",
    "CloseAnswered",
    "CloseOutcome",
    "Closing",
    "DialFailed",
    "HandshakeReceived",
    "KeysRenewed",
    "OpenAccess",
    "Opened",
    "PartsAnswered",
    "PartsReady",
    "PeerAlive",
    "PeerAnswered",
    "PeerRequest",
    "PeerSilent",
    "PostSend",
    "PostSendAnswered",
    "ProofRefused",
    "ReadyPart",
    "RegisterAnswered",
    "RenewAnswered",
    "SettleAccess",
    "SettleAnswered",
    "Settling",
]
