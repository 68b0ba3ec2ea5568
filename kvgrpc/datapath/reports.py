"""Reports of a mover to its owner: events of its rank, delivered one at a time from the mover's thread.

For one rank of a peer, PeerMapped comes before every PostingEnded, and Disconnected after the last. Each `post` is
answered by one PostingEnded, each `connect` by one PeerMapped, before which MeetingBegan may come, each `offer` by one
EndpointOffered. Each `disconnect` is answered by one Disconnected for each connected rank, or by one if there was none.
Each `rekey` is answered by one Rekeyed, after the PostingEnded and Disconnected that it caused. A posting is not
`quiesced` if a data path broke its promises (raised where it must not), if its bytes had left and its connection broke,
or if its path was closed under it. Such a posting may end again, when it is proved that no access follows.
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


@dataclass(frozen=True)
class Disconnected:
    """A rank of a peer is disconnected, and may be connected again. This report is no event: a lead maps a peer again
    only under a new handshake.
    """

    peer: str
    error: str = ""
    """Why it is not proved that the transport is closed and no access of ours follows; empty if it is."""
    peer_rank: int | None = None
    """Rank of the peer; None if none was connected."""


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
