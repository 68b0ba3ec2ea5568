"""What a lead still says of a life that a defect ended: that nothing of it accesses its peers' memory any more.

Peers learn at once that the life is over, by the end of its streams. Blocks that it was writing stay in quarantine with
them until it is proved that no write follows. Where this process moves the bytes, its movers know: they are closed with
the life, and a posting that has not ended with a proof is one too many. To such a peer nothing is said.
"""

from collections.abc import Collection

from kvgrpc.core.actions import SendClose
from kvgrpc.service.peers.port import PeerChannels


class LastWords:
    """Closings of a life that is over, until its movers are closed."""

    def __init__(self, channels: PeerChannels) -> None:
        self._channels = channels
        self._unsaid: list[SendClose] = []

    def hold(self, closings: list[SendClose]) -> None:
        """A life is over. `closings` are said when its movers are closed; none, where no peer will know of them."""
        self._unsaid = [*self._unsaid, *closings]
        self._channels.end_life({send.peer for send in self._unsaid})

    async def say(self, accessed: Collection[str]) -> None:
        """The movers are closed. Postings that are not proved to be over may still access memory of some peers."""
        unsaid, self._unsaid = self._unsaid, []
        told = [send for send in unsaid if send.peer not in accessed]
        await self._channels.close_last({send.peer for send in unsaid}, told)
