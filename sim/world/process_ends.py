"""The ends of peers' processes, as the ranks of one life of an engine see them if they look in time."""

from collections.abc import Callable, Collection

from kvgrpc.core.actions import AwaitEnd, UnmapPeer
from kvgrpc.core.events import ProcessEnded

Reached = Callable[[int, str], Collection[int]]
"""Returns the ranks of a peer's life whose memory a rank reaches. The rank knows only their processes."""


class Ends:
    """The ends as `ranks` ranks see them; `report` takes what they see."""

    def __init__(self, ranks: int, reached: Reached, report: Callable[[ProcessEnded], None]) -> None:
        self._ranks = ranks
        self._reached = reached
        self._report = report
        self._looking: set[tuple[int, str, int]] = set()
        """Rank, life, and rank of that life."""
        self._blind: set[tuple[int, str]] = set()
        """Ranks that had to look at a life and did not know where."""
        self._told: set[tuple[int, str]] = set()
        self._ended: dict[str, bool] = {}
        """Lives whose processes are gone, and True if all that they sent has landed for sure."""

    def look(self, action: AwaitEnd) -> None:
        """Makes a rank look for the ends of the processes that it reaches."""
        reached = {(action.rank, action.peer, peer_rank) for peer_rank in self._reached(action.rank, action.peer)}
        if not reached:
            self._blind.add((action.rank, action.peer))
        for name in sorted(reached - self._looking):
            self._looking.add(name)
            if action.peer in self._ended:
                self._tell(*name)

    def unmap(self, action: UnmapPeer) -> None:
        """Lets a rank forget a peer, and the peer's process unless the rank must look for its end."""
        if not action.watch:
            self._looking -= {name for name in self._looking if name[:2] == (action.rank, action.peer)}

    def ended(self, life: str, *, drained: bool) -> None:
        """Takes note that the processes of a life are gone, and again when their sends have landed."""
        self._ended[life] = drained
        for name in sorted(self._looking):
            if name[1] == life:
                self._tell(*name)

    def missed(self, life: str) -> bool:
        """Returns True if a rank could have seen the end of a life, and was not asked to look."""
        looked = self._told | self._blind
        return life in self._ended and any((rank, life) not in looked for rank in range(self._ranks))

    def _tell(self, rank: int, life: str, peer_rank: int) -> None:
        self._told.add((rank, life))
        self._report(ProcessEnded(rank, life, self._ended[life], peer_rank))
