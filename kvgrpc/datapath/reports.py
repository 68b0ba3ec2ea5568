"""What a mover tells its owner: events of its rank, delivered one at a time from the mover's thread.

Order: of one rank of a peer, PeerMapped comes before every PostingEnded and Disconnected after the last. Each `post` is
answered by one PostingEnded, each `connect` by one PeerMapped, before which MeetingBegan may come, each `offer` by one
EndpointOffered, each `disconnect` by one Disconnected for each rank that was connected, or by one if none was, each
`rekey` by one Rekeyed, after the PostingEnded and Disconnected that it caused. A posting is not `quiesced` when a data
path broke its promises (raised where it must not), or when its bytes had left and its connection broke, or its path was
closed under it. It may end again, when it is proved that no access follows.
"""

from dataclasses import dataclass

from kvgrpc.core.events import (
    EndpointOffered,
    MeetingBegan,
    PeerMapped,
    PostingEnded,
    ProcessEnded,
    Rekeyed,
    SendPosted,
    SendWanted,
)

Rejected = tuple[tuple[str, str], ...]
"""Data paths that were not taken, in the order tried: (name, reason as text)."""


@dataclass(frozen=True)
class Disconnected:
    """A rank of a peer is disconnected, and may be connected again. No event: a lead maps a peer again under a new
    handshake only.
    """

    peer: str
    error: str = ""
    """Empty: the transport is closed and no access of ours follows. Else why that is not proved."""
    peer_rank: int | None = None
    """None: no rank of that peer was connected."""


Report = (
    EndpointOffered
    | MeetingBegan
    | PeerMapped
    | PostingEnded
    | Disconnected
    | ProcessEnded
    | Rekeyed
    | SendWanted
    | SendPosted
)
