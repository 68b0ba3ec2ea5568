"""Everything that can happen to a node. Frozen values; checked for form by whoever made them, for meaning by the node.

Calls carry a `Call`; each is answered exactly once, by a Reply or a Refuse with its id. Random ids enter here.
"""

from dataclasses import dataclass
from typing import NamedTuple

from kvgrpc.core.accesses import Opening, Verdict
from kvgrpc.core.compatibility import EngineDescription
from kvgrpc.core.content import Content
from kvgrpc.core.descriptors import Ids
from kvgrpc.core.endpoints import RankEndpoint
from kvgrpc.core.grants import OnAbort
from kvgrpc.errors import KVGrpcError

BlockLists = tuple[tuple[int, Ids], ...]
"""Rows (group, block ids) as a caller wrote them."""


@dataclass(frozen=True)
class Call:
    """Who asks, and under which idempotency key."""

    id: int
    principal: str
    trace: str = ""
    """W3C traceparent of the call; empty without one."""
    key: str = ""
    method: str = ""
    body: bytes = b""
    """Digest of the request without its key."""
    incarnation: int = 0
    """The life of this engine that the request's block ids are of; 0 where it does not say."""


@dataclass(frozen=True, eq=False)
class FinishedBlocks:
    """Blocks of a whole prompt, for readers. `transfer` is False for GrantLease."""

    call: Call
    key: bytes
    blocks: BlockLists
    content: Content | None
    ttl_s: float | None = None
    consumers: int = 1
    on_abort: OnAbort = OnAbort.RELEASE
    request_id: str = ""
    priority: int = 0
    after_step: int = 0
    lease_id: str = ""
    validate_only: bool = False
    transfer: bool = True
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, eq=False)
class Destination:
    """Where pulled blocks go: nothing moves when no group has a block."""

    blocks: BlockLists
    have_tokens: int = 0


@dataclass(frozen=True, eq=False)
class PullBlocks:
    """A new pull."""

    call: Call
    token: bytes
    content: Content | None
    access_id: bytes
    use_tokens: int = 0
    destination: Destination | None = None
    key: bytes = b""
    request_id: str = ""
    priority: int = 0
    after_step: int = 0
    queue_timeout_s: float | None = None
    transfer_timeout_s: float | None = None
    validate_only: bool = False


@dataclass(frozen=True, eq=False)
class GiveDestination:
    """PullBlocks by transfer id: the blocks of an earlier pull."""

    call: Call
    transfer_id: str
    destination: Destination
    after_step: int = 0
    validate_only: bool = False
    key: bytes = b""
    """The request's transfer key; where it is stated it is the pull's."""


class LeaseRef(NamedTuple):
    """A lease by id, or by a grant's token."""

    lease_id: str = ""
    token: bytes = b""


@dataclass(frozen=True)
class RenewLeases:
    """Extends leases, row by row."""

    call: Call
    leases: tuple[LeaseRef, ...]
    ttl_s: float | None = None


@dataclass(frozen=True)
class ReleaseLease:
    """Ends a lease before its time."""

    call: Call
    lease: LeaseRef


@dataclass(frozen=True)
class CancelTransfer:
    """By id, or by key: then also those to come."""

    call: Call
    transfer_id: str = ""
    key: bytes = b""
    message: str = ""


@dataclass(frozen=True)
class AcknowledgeTransfers:
    """The engine has seen the end of these transfers."""

    call: Call
    transfer_ids: tuple[str, ...]


@dataclass(frozen=True)
class AllocateBlocks:
    """Takes blocks, or renews the TTL of an earlier allocation."""

    call: Call
    counts: tuple[tuple[int, int], ...]
    ttl_s: float | None = None
    allocation_id: str = ""


@dataclass(frozen=True, eq=False)
class FreeBlocks:
    """Gives blocks back to a pool that this server manages."""

    call: Call
    blocks: BlockLists


@dataclass(frozen=True)
class ConnectPeer:
    """A router wants the handshake done now."""

    call: Call
    address: str
    engine_id: str = ""


@dataclass(frozen=True)
class HandshakeReceived:
    """A peer introduces itself."""

    call: Call
    peer: EngineDescription
    endpoints: tuple[RankEndpoint, ...]
    expected_engine_id: str = ""


@dataclass(frozen=True)
class PeerAnswered:
    """The peer at a dialled address answered the handshake, and its liveness stream stands."""

    address: str
    peer: EngineDescription
    endpoints: tuple[RankEndpoint, ...]


@dataclass(frozen=True)
class DialFailed:
    """The handshake with an address failed."""

    address: str
    error: KVGrpcError


@dataclass(frozen=True)
class PeerAlive:
    """A liveness stream with that life of a peer stands (again)."""

    peer: str


@dataclass(frozen=True)
class PeerSilent:
    """The liveness stream broke or fell silent."""

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


@dataclass(frozen=True)
class SettleAccess:
    """A peer settles accesses here."""

    call: Call
    engine_id: str
    incarnation: int
    settlings: tuple[Settling, ...]


@dataclass(frozen=True)
class Closing:
    """One row of CloseAccess."""

    access_id: bytes
    dropped: bool
    quiesced: bool
    token: bytes = b""


@dataclass(frozen=True)
class CloseAccess:
    """A peer closes accesses here."""

    call: Call
    engine_id: str
    incarnation: int
    closings: tuple[Closing, ...]


@dataclass(frozen=True, eq=False)
class Opened:
    """What an issuer answered to an opening."""

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
    """Also true for NO_HANDSHAKE: whoever does not know us has none of our accesses."""


@dataclass(frozen=True)
class RenewAnswered:
    """The issuer renewed, or refused, the lease of one of our pulls."""

    transfer_id: str
    error: KVGrpcError | None


@dataclass(frozen=True)
class EndpointOffered:
    """A rank made an endpoint for one peer."""

    rank: int
    key: str
    endpoint: RankEndpoint


@dataclass(frozen=True)
class PeerMapped:
    """A rank reached (or not: empty `data_path`) the same rank of a peer."""

    rank: int
    peer: str
    data_path: str
    why: str
    rejected: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class PostingEnded:
    """A posting is over: no access of it follows, unless it is not `quiesced`."""

    posting_id: str
    done: bool
    nbytes: int = 0
    wire_s: float = 0.0
    message: str = ""
    quiesced: bool = True
    """False: it failed, and nobody can say that no access follows."""


@dataclass(frozen=True)
class StepDone:
    """A rank finished all work of the engine's steps up to this one."""

    rank: int
    step: int


@dataclass(frozen=True)
class LeasesVoided:
    """The engine took the blocks of these leases back (their void flags are set)."""

    lease_ids: tuple[str, ...]


@dataclass(frozen=True)
class LifeBegan:
    """A new incarnation: the lead started, or an engine attached or was lost."""

    incarnation: int
    secret: bytes
    description: EngineDescription | None
    """None while there is no pool."""
    engine_attached: bool = False


@dataclass(frozen=True)
class Tick:
    """Nothing but the passing of time."""


Event = (
    FinishedBlocks | PullBlocks | GiveDestination | RenewLeases | ReleaseLease | CancelTransfer
    | AcknowledgeTransfers | AllocateBlocks | FreeBlocks | ConnectPeer | HandshakeReceived | PeerAnswered
    | DialFailed | PeerAlive | PeerSilent | OpenAccess | SettleAccess | CloseAccess | AccessAnswered
    | SettleAnswered | CloseAnswered | RenewAnswered | EndpointOffered | PeerMapped | PostingEnded | StepDone
    | LeasesVoided | LifeBegan | Tick
)  # fmt: skip
