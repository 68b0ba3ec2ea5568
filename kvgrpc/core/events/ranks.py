"""Reports of ranks."""

from kvgrpc.core.values.call import LayerRange
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.core.values.records import dataclass
from kvgrpc.core.values.sends import SendAsk, Values


@dataclass(frozen=True)
class EndpointOffered:
    """A rank made an endpoint for one peer."""

    rank: int
    key: str
    endpoint: RankEndpoint


@dataclass(frozen=True)
class PeerMapped:
    """A rank reached a rank of a peer, or did not: then `data_path` is empty."""

    rank: int
    peer: str
    data_path: str
    why: str
    rejected: tuple[tuple[str, str], ...] = ()
    attempt: int = 0
    """The attempt that this answers; 0: the worker does not say, and the last attempt is meant."""
    peer_rank: int = 0
    permanent: bool = False
    """True if a meeting that began failed, and another try does not change that."""


@dataclass(frozen=True)
class MeetingBegan:
    """A rank and a peer's rank wait for each other's half of a process group. PeerMapped may take longer now, since
    either may first have to load a library.
    """

    rank: int
    peer: str
    attempt: int
    """The attempt under way."""
    peer_rank: int


@dataclass(frozen=True)
class PostingEnded:
    """A posting is over: no access of it follows, unless it is not `quiesced`."""

    posting_id: str
    done: bool
    nbytes: int = 0
    """Bytes known to be in the destination: all of them when `done`, else perhaps fewer than arrived."""
    wire_s: float = 0.0
    """Time from the first byte that could move to the end, in seconds; 0 when nothing was started."""
    message: str = ""
    """Why it failed, as text; empty when `done`."""
    quiesced: bool = True
    """False: it failed, without a proof that no access follows."""
    own_at_rest: bool = False
    """For a WRITE that is not `quiesced`: this engine's memory is at rest, only the peer's may still be written."""
    post_s: float = 0.0
    """Time within `wire_s` that the data path spent submitting, in seconds; all of it if submitting moves the bytes."""


@dataclass(frozen=True)
class StepDone:
    """A rank finished all work of the engine's steps up to this one; with `layers`, the work of those layers only."""

    rank: int
    step: int
    layers: LayerRange | None = None


@dataclass(frozen=True)
class ProcessEnded:
    """The process of a peer's rank, which could write into this engine's memory, is gone."""

    rank: int
    peer: str
    drained: bool
    """True: nothing that the process wrote lands any more. False: it may, until the rank is re-keyed."""
    peer_rank: int = 0


@dataclass(frozen=True)
class Rekeyed:
    """A rank restarted the data paths by which peers write: its earlier endpoints are void."""

    rank: int
    message: str = ""
    """Empty: writes over the old data paths cannot land any more. Else why that is not proved."""


@dataclass(frozen=True)
class ChecksumsComputed:
    """A rank computed checksums of blocks of its memory."""

    rank: int
    name: str
    values: bytes
    """CRC-32C of each block asked for: uint32, little-endian, concatenated."""
    message: str = ""
    """Why there are no checksums; empty: there are."""


@dataclass(frozen=True)
class CopiedOut:
    """A rank copied bytes into its mirror, or could not."""

    rank: int
    name: str
    message: str = ""
    """Why the bytes are not in the mirror; empty: they are."""


@dataclass(frozen=True, eq=False)
class SendWanted:
    """A rank asks a peer's rank to send: for the posting `posting_id`, or, if that is empty, to make their process
    group. Answered by `actions.AnswerSend`.
    """

    rank: int
    peer: str
    posting_id: str
    ask: SendAsk


@dataclass(frozen=True)
class SendPosted:
    """A rank sends what a peer asked for, or does not. This does not say what has arrived."""

    rank: int
    name: str
    values: Values = ()
    """This rank's half of a process group that is being made, for the other side."""
    message: str = ""
    """Why the rank does not send; empty: it does."""
    permanent: bool = False
    """True if the two ranks cannot meet, and another try does not change that."""
