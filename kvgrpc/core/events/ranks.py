"""What ranks report."""

from dataclasses import dataclass

from kvgrpc.core.values.calls import LayerRange
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.core.values.sends import SendAsk, Values


@dataclass(frozen=True)
class EndpointOffered:
    """A rank made an endpoint for one peer."""

    rank: int
    key: str
    endpoint: RankEndpoint


@dataclass(frozen=True)
class PeerMapped:
    """A rank reached (or not: empty `data_path`) a rank of a peer."""

    rank: int
    peer: str
    data_path: str
    why: str
    rejected: tuple[tuple[str, str], ...] = ()
    attempt: int = 0
    """The one that it answers; 0: its worker does not say, and the last one is meant."""
    peer_rank: int = 0


@dataclass(frozen=True)
class MeetingBegan:
    """A rank that reaches for a rank of a peer waits until both have made their half of what joins them: PeerMapped may
    take longer, since either may have to load a library first.
    """

    rank: int
    peer: str
    attempt: int
    """The one that it is at."""
    peer_rank: int


@dataclass(frozen=True)
class PostingEnded:
    """A posting is over: no access of it follows, unless it is not `quiesced`."""

    posting_id: str
    done: bool
    nbytes: int = 0
    """Bytes known to be in the destination: all when `done`, else perhaps fewer than there are."""
    wire_s: float = 0.0
    """From the first byte that could move to the end; 0 when nothing was started."""
    message: str = ""
    """Why it failed; empty when `done`."""
    quiesced: bool = True
    """False: it failed, without a proof that no access follows."""
    own_at_rest: bool = False
    """A WRITE that is not `quiesced`: this engine's memory is at rest, only the peer's may still be written."""
    post_s: float = 0.0
    """How much of `wire_s` the data path was busy with submitting; of one that moves as it submits, all of it."""


@dataclass(frozen=True)
class StepDone:
    """A rank finished all work of the engine's steps up to this one; with `layers` only that of those layers."""

    rank: int
    step: int
    layers: LayerRange | None = None


@dataclass(frozen=True)
class ProcessEnded:
    """The process of a rank of a peer, which could write into this engine's memory, is gone."""

    rank: int
    peer: str
    drained: bool
    """Nothing that it wrote lands any more. Else what it had sent may, until the rank is re-keyed."""
    peer_rank: int = 0


@dataclass(frozen=True)
class Rekeyed:
    """A rank began the data paths again by which peers write: earlier endpoints of it are void."""

    rank: int
    message: str = ""
    """Empty: nothing that peers wrote by the old ones lands any more. Else why that is not proved."""


@dataclass(frozen=True)
class ChecksumsComputed:
    """A rank has computed checksums of blocks of its memory."""

    rank: int
    name: str
    values: bytes
    """CRC-32C of each block asked for, uint32, little-endian, one after the other."""
    message: str = ""
    """Why there are none; empty: there are."""


@dataclass(frozen=True)
class CopiedOut:
    """A rank has copied bytes into its mirror, or could not."""

    rank: int
    name: str
    message: str = ""
    """Why they are not there; empty: they are."""


@dataclass(frozen=True, eq=False)
class SendWanted:
    """A rank asks a rank of a peer to send, for a posting of its own, or (empty) to make their process group as it
    reaches for it. Answered by `actions.AnswerSend`.
    """

    rank: int
    peer: str
    posting_id: str
    ask: SendAsk


@dataclass(frozen=True)
class SendPosted:
    """A rank sends what a peer asked for, or does not. It says nothing about what has arrived."""

    rank: int
    name: str
    values: Values = ()
    """Of a process group that it makes: what the other side has to know."""
    message: str = ""
    """Why it does not; empty: it does."""


__all__ = [
    "ChecksumsComputed",
    "CopiedOut",
    "EndpointOffered",
    "MeetingBegan",
    "PeerMapped",
    "PostingEnded",
    "ProcessEnded",
    "Rekeyed",
    "SendPosted",
    "SendWanted",
    "StepDone",
]
