"""What a mover tells its owner: values, delivered one at a time from the mover's thread.

Order: of one peer, Connected comes before every PostingEnded and Disconnected after the last. Each
`post` is answered by one PostingEnded, each `connect` by one Connected or ConnectFailed, each
`offer` by one Offered, each `disconnect` by one Disconnected, each `rekey` by one Rekeyed, after the
PostingEnded and Disconnected that it caused. A posting that was lost (not `quiesced`) may end again,
when that is proved.
"""

from dataclasses import dataclass

from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.datapath.base import PostingState

Rejected = tuple[tuple[str, str], ...]
"""Data paths that were not taken, in the order tried: (name, reason for people)."""


@dataclass(frozen=True)
class Offered:
    """How one peer may reach this rank's memory."""

    key: str
    """As given to `offer`."""
    endpoint: RankEndpoint
    left_out: Rejected
    """Paths that this rank has but cannot offer."""


@dataclass(frozen=True)
class Connected:
    """The peer's memory was reached."""

    peer: str
    path: str
    """Name of the data path: shm, cma, nixl, loopback."""
    why: str
    """How the bytes will move, for people."""
    rejected: Rejected
    """Better paths that did not work."""
    attempt: int = 0
    """As given to `connect`."""


@dataclass(frozen=True)
class ConnectFailed:
    """No allowed path reaches the peer's memory."""

    peer: str
    rejected: Rejected
    attempt: int = 0
    """As given to `connect`."""


@dataclass(frozen=True)
class PostingEnded:
    """One posting is over."""

    posting: str
    state: PostingState
    """DONE or FAILED."""
    nbytes: int
    """Bytes known to be in the destination: all of the posting's when DONE; when FAILED perhaps
    fewer than there are."""
    wire_s: float
    """From the first byte that could move to the end, in seconds; 0 when nothing was started."""
    error: str
    """Why it FAILED, for people; empty when DONE."""
    quiesced: bool = True
    """Whether it is proved that no access of this posting follows: else treat the destination as still
    being written. False when a data path broke its promises (raised where it must not), and for a
    write whose bytes had left when its connection broke, or when its path was closed under it."""
    own_at_rest: bool = True
    """Whether this rank's own memory is at rest. Of a write that is not `quiesced` it may be: nothing reads the
    source any more, but what was read of it may still land."""


@dataclass(frozen=True)
class Disconnected:
    """The peer is disconnected, and its name free."""

    peer: str
    error: str = ""
    """Empty: the transport is closed and no access of ours follows. Else why that is not proved."""


@dataclass(frozen=True)
class ProcessEnded:
    """The process that wrote for a peer is gone."""

    peer: str
    drained: bool
    """Nothing that it wrote lands any more. Else what it sent may, until this rank is re-keyed."""


@dataclass(frozen=True)
class Rekeyed:
    """What peers could do before with this rank's memory, by paths that write, is over."""

    error: str = ""
    """Empty: no access of before follows. Else why that is not proved."""


@dataclass(frozen=True)
class Summed:
    """Blocks of this rank's memory were summed up, or cannot be."""

    name: str
    """As given to `sum`."""
    values: bytes
    """CRC-32C of each, uint32, little-endian."""
    error: str = ""


Report = Offered | Connected | ConnectFailed | PostingEnded | Disconnected | ProcessEnded | Rekeyed | Summed
