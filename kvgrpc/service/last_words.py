"""Last closings of a life that a defect ended: they tell peers that nothing accesses their memory any more.

Peers learn at once that the life is over, by the end of its streams. Blocks that the life was writing stay in
quarantine at the peers until it is proved that no write follows. If this process moves the bytes, its movers can prove
it: they are closed with the life. A peer gets no closing if a posting towards it has not ended with a proof.
"""

from collections.abc import Collection

from kvgrpc.core.actions import SendClose
from kvgrpc.service.peers.port import PeerChannels


class LastWords:
    """Closings of a life that is over, held until its movers are closed."""

    def __init__(self, channels: PeerChannels) -> None:
        self._channels = channels
        self._unsaid: list[SendClose] = []

    def hold(self, closings: list[SendClose]) -> None:
        """Holds closings of a life that is over until its movers are closed; empty if no proof will come."""
        self._unsaid = [*self._unsaid, *closings]
        self._channels.end_life({send.peer for send in self._unsaid})

    async def say(self, accessed: Collection[str]) -> None:
        """Sends the closings after the movers closed. Peers in `accessed`, which postings may still reach, get none."""
        unsaid, self._unsaid = self._unsaid, []
        told = [send for send in unsaid if send.peer not in accessed]
        await self._channels.close_last({send.peer for send in unsaid}, told)
