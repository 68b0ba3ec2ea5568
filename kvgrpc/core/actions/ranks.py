"""Commands from a node to its ranks; ranks report back as `events.ranks`."""

from enum import Enum

from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.core.values.pieces import Pieces
from kvgrpc.core.values.records import dataclass
from kvgrpc.core.values.sends import SendAnswer, SendAsk
from kvgrpc.core.values.strips import Repack


class Operation(Enum):
    """Direction of a posting, seen from the rank that posts it."""

    READ = "read"
    """From the peer's memory into this rank's."""
    WRITE = "write"
    """From this rank's memory into the peer's."""


@dataclass(frozen=True)
class MakeOffer:
    """A rank makes an endpoint for one peer: answered by EndpointOffered."""

    rank: int
    key: str
    peer: str
    """The peer to make it for: a life, or the address that we dial. Only a peer's last few offers are valid."""


@dataclass(frozen=True)
class MapPeer:
    """A rank maps the peer's rank that the endpoint names: answered by PeerMapped."""

    rank: int
    peer: str
    endpoint: RankEndpoint
    attempt: int
    """Number that PeerMapped repeats: a late answer may belong to an earlier attempt."""
    allowed: tuple[str, ...] | None = None
    """Data paths that may be used, best first. None: all of the rank's."""


@dataclass(frozen=True)
class UnmapPeer:
    """A rank forgets all ranks of a peer, each once its last posting ended."""

    rank: int
    peer: str
    watch: bool = False
    """The rank keeps watching for the ends of the peer's processes, if it already does."""
    gone: bool = False
    """The peer's life is over: nothing that was offered to it is valid any more."""
    peer_rank: int | None = None
    """The one rank of the peer to forget. None: all of them."""


@dataclass(frozen=True, eq=False)
class Post:
    """A rank moves bytes: answered by PostingEnded."""

    rank: int
    posting_id: str
    peer: str
    runs: Runs
    transfer_id: str
    operation: Operation = Operation.READ
    fills: str = ""
    """For a WRITE: the peer's transfer whose blocks are filled."""
    checksums: "ComputeChecksums | None" = None
    """Blocks that have arrived when a READ is DONE: the rank computes their checksums as they arrive."""
    peer_rank: int = 0
    """The peer's rank that owns the peer's memory."""
    repack: Repack | None = None
    """For a READ: `runs` fill a staging buffer of the rank from its first byte, and the re-pack follows the last byte.
    The posting is DONE only after the re-pack.
    """


@dataclass(frozen=True)
class Expect:
    """A peer may (`open`) or no longer may access this engine's memory: some data paths need progress meanwhile."""

    access: str
    open: bool
    writes: bool = False
    """The peer may write, or is not proved to have stopped: the memory is not at rest."""
    paths: tuple[str, ...] = ()
    """Data paths that the peer says it will use; empty: not known."""


@dataclass(frozen=True)
class AwaitEnd:
    """A rank watches for the ends of the processes that write for a peer, among the peer's ranks it has reached. It
    reports each visible end as ProcessEnded.
    """

    rank: int
    peer: str


@dataclass(frozen=True)
class Rekey:
    """A rank restarts the data paths by which peers write: answered by Rekeyed."""

    rank: int


@dataclass(frozen=True, eq=False)
class ComputeChecksums:
    """A rank computes checksums of blocks of its memory: answered by ChecksumsComputed."""

    rank: int
    name: str
    pieces: Pieces


@dataclass(frozen=True, eq=False)
class CopyOut:
    """A rank copies bytes of memory that no data path reaches into its mirror: answered by CopiedOut."""

    rank: int
    name: str
    pieces: Pieces


@dataclass(frozen=True, eq=False)
class Send:
    """A rank sends bytes of its memory to a peer's rank that asked for them: answered by SendPosted."""

    rank: int
    name: str
    peer: str
    ask: SendAsk


@dataclass(frozen=True)
class AnswerSend:
    """The outcome of a rank's SendWanted."""

    rank: int
    peer: str
    answer: SendAnswer


RankAction = (
    MakeOffer | MapPeer | UnmapPeer | Post | Expect | AwaitEnd | Rekey | ComputeChecksums | CopyOut | Send | AnswerSend
)
"""Every command to a rank."""
