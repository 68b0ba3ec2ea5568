"""What a node asks of its ranks; they report back as `events.ranks`."""

from dataclasses import dataclass
from enum import Enum

from kvgrpc.core.values.descriptors import Runs
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.core.values.pieces import Pieces
from kvgrpc.core.values.sends import SendAnswer, SendAsk
from kvgrpc.core.values.strips import Repack


class Operation(Enum):
    """What a posting does with the bytes, seen from the rank that posts it."""

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
    """Whom it is for: a life, or the address that we dial. Of one peer only the last few offers are good."""


@dataclass(frozen=True)
class MapPeer:
    """A rank reaches for a rank of a peer, the one that its endpoint names: answered by PeerMapped."""

    rank: int
    peer: str
    endpoint: RankEndpoint
    attempt: int
    """Names the answer: of one that was let go meanwhile it may still come."""


@dataclass(frozen=True)
class UnmapPeer:
    """A rank forgets all ranks of a peer, each once its last posting ended."""

    rank: int
    peer: str
    watch: bool = False
    """The ends of their processes are looked for all the same, if they are by now."""
    gone: bool = False
    """Its life is over: what it was offered is good for nothing any more."""


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
    """The peer's transfer whose blocks are filled, of a WRITE."""
    checksums: "ComputeChecksums | None" = None
    """Blocks that have arrived when a READ is DONE: the rank computes their checksums as they arrive."""
    peer_rank: int = 0
    """The rank of the peer whose memory it is."""
    repack: Repack | None = None
    """Of a READ: `runs` end in a staging buffer of the rank's, from its first byte on, and this comes after the last
    byte. DONE is said when it is done, too."""


@dataclass(frozen=True)
class Expect:
    """A peer may (`open`) or no longer may access this engine's memory: some data paths need progress meanwhile."""

    access: str
    open: bool
    writes: bool = False
    """It may write, or it is not proved that it does not: the memory is not at rest."""
    paths: tuple[str, ...] = ()
    """The data paths over which it says it will; empty: not known."""


@dataclass(frozen=True)
class AwaitEnd:
    """A rank looks for the ends of the processes that write for a peer, of those of its ranks that it has reached:
    ProcessEnded for each, if that can be seen.
    """

    rank: int
    peer: str


@dataclass(frozen=True)
class Rekey:
    """A rank begins the data paths again by which peers write: answered by Rekeyed."""

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
    """A rank sends bytes of its memory to a rank of a peer, which asked for them: answered by SendPosted."""

    rank: int
    name: str
    peer: str
    ask: SendAsk


@dataclass(frozen=True)
class AnswerSend:
    """What came of a SendWanted of a rank."""

    rank: int
    peer: str
    answer: SendAnswer


__all__ = [
    "AnswerSend",
    "AwaitEnd",
    "ComputeChecksums",
    "CopyOut",
    "Expect",
    "MakeOffer",
    "MapPeer",
    "Post",
    "Rekey",
    "Send",
    "UnmapPeer",
]
