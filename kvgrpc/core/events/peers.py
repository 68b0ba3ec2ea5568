"""Requests and answers of other leads."""

from dataclasses import field

from kvgrpc.core.tables.accesses import AccessOpening, CloseOutcome, Verdict
from kvgrpc.core.values.block_ids import BlockLists, keeping_lists
from kvgrpc.core.values.call import Call, LayerRange, ReadyPart
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.core.values.records import dataclass
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
    """Proof that this engine must show to the peer."""
    asks: bytes = field(default=b"", repr=False)
    """Proof drawn for this call. The peer must show it here, unless it showed a proof from an earlier handshake."""
    proofs: tuple[bytes, ...] = field(default=(), repr=False)
    """Proofs that the peer says it was told before."""


@dataclass(frozen=True)
class PeerAnswered:
    """The peer at a dialled address answered the handshake, and its liveness stream stands."""

    address: str
    peer: EngineDescription
    endpoints: tuple[RankEndpoint, ...]
    shows: bytes = field(default=b"", repr=False)
    """Proof that this engine must show to the peer."""
    asks: bytes = field(default=b"", repr=False)
    """Proof that the peer was told to show here."""


@dataclass(frozen=True)
class DialFailed:
    """The handshake with an address failed."""

    address: str
    error: KVGrpcError


@dataclass(frozen=True)
class PeerAlive:
    """A liveness stream with this life of a peer stands, for the first time or again."""

    peer: str
    proof: bytes = field(default=b"", repr=False)
    """Proof shown by the other end of the stream."""


@dataclass(frozen=True)
class PeerSilent:
    """The liveness stream broke or fell silent."""

    peer: str


@dataclass(frozen=True)
class ProofRefused:
    """A life of a peer refused this engine's proof, for a call that is retried later."""

    peer: str


@dataclass(frozen=True)
class OpenAccess:
    """A peer opens accesses here."""

    call: Call
    engine_id: str
    incarnation: int
    openings: tuple[AccessOpening, ...]


@dataclass(frozen=True)
class AccessSettling:
    """One row of SettleAccess."""

    access_id: bytes
    last: bool
    nbytes: int = 0
    """Bytes moved under the access since its last settling."""
    part: int = 0
    """The last settled part, counted from 0 within the access; all earlier parts are settled with it."""
    layers_done: tuple[LayerRange, ...] = ()
    """From a source that writes: layers of which every block has arrived."""


@dataclass(frozen=True)
class SettleAccess:
    """A peer settles accesses here."""

    call: Call
    engine_id: str
    incarnation: int
    settlings: tuple[AccessSettling, ...]


@dataclass(frozen=True)
class AccessClosing:
    """One row of CloseAccess, for an access that the caller opened here. A source also closes accesses that this engine
    opened there: with CANCELLED, or with FAILED when its blocks may be gone.
    """

    access_id: bytes
    outcome: CloseOutcome
    quiesced: bool
    """The closing side's movers are proved at rest. Without this the closing proves nothing about a WRITE access."""
    token: bytes = b""
    """The access's grant, so that an access that was never opened can be closed. A source that has opened nothing yet
    closes a WRITE grant to say that it cannot deliver.
    """
    message: str = ""
    """The reason, as text."""


@dataclass(frozen=True)
class CloseAccess:
    """A peer closes accesses here."""

    call: Call
    engine_id: str
    incarnation: int
    closings: tuple[AccessClosing, ...]


@dataclass(frozen=True, eq=False)
class PartsReady:
    """A source widens the READ access that it opened for this engine: answered by Widened.

    Idempotent: known parts are skipped. A call that leaves a gap before its parts is refused.
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
    """An issuer's answer to an opening.

    For a WRITE grant `blocks` are the target's: the last blocks of each group up to `token_count`. Earlier blocks are
    held already. `lease_id` is the target's, `ttl_s` the registration timeout.
    """

    blocks: BlockLists
    token_count: int
    offer_tokens: int
    remaining_s: float
    ttl_s: float
    memory_generation: int
    transfer_id: str = ""
    lease_id: str = ""
    data_paths: tuple[str, ...] = ()
    """Data paths by which a destination that moves the bytes reads, each once; empty: not known."""


@dataclass(frozen=True, eq=False)
class AccessAnswered:
    """The issuer answered our opening; a `retryable` error is retried."""

    access_id: bytes
    result: Opened | KVGrpcError
    retryable: bool = False


@dataclass(frozen=True)
class SettleAnswered:
    """The issuer answered our settle; a `retryable` error may be retried until the settle deadline."""

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
    """True if the answered closing said that its caller is at rest."""


@dataclass(frozen=True)
class PartsAnswered:
    """The destination took the parts of one SendParts, or refused; a `retryable` error is retried."""

    access_id: bytes
    error: KVGrpcError | None
    retryable: bool = False


@dataclass(frozen=True)
class RegisterAnswered:
    """The source of a push took its registration, or refused; a `retryable` error is retried."""

    transfer_id: str
    """Our transfer."""
    life: str
    """The life that took it. With an error, the life that was asked."""
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
    """Block ids of this engine, with their layers; None: all layers."""


@dataclass(frozen=True, eq=False)
class PostSend:
    """A peer asks a rank of this engine to send what the peer reads."""

    call: Call
    engine_id: str
    incarnation: int
    access_id: bytes
    ask: SendAsk


@dataclass(frozen=True)
class PostSendAnswered:
    """The outcome of a PostSend of one of our ranks."""

    rank: int
    peer: str
    answer: SendAnswer
    incarnation: int = 0
    """Our life that asked; 0: not known."""


@dataclass(frozen=True)
class CallAbandoned:
    """The caller does not wait for its answer any more: it gave up, its deadline is over, or its connection is gone."""

    call_id: int


@dataclass(frozen=True)
class ChecksumsAnswered:
    """The source's checksums of a round's blocks, or of some of them; a `retryable` error is retried."""

    name: str
    number: int
    result: tuple[bytes, ...] | KVGrpcError
    """Checksums of each rank, as in `ChecksumsComputed.values`."""
    retryable: bool = False


@dataclass(frozen=True)
class RenewAnswered:
    """The issuer renewed the lease of one of our pulls, or refused."""

    transfer_id: str
    error: KVGrpcError | None


@dataclass(frozen=True)
class KeysRenewed:
    """The source renewed leases by key. Rows are (key, seconds left); unknown keys are not listed."""

    peer: str
    rows: tuple[tuple[bytes, float], ...]


PeerRequest = OpenAccess | SettleAccess | CloseAccess | PartsReady | ChecksumBlocks | PostSend
"""The requests that a life of a peer makes."""
