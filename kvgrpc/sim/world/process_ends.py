"""The ends of peers' processes, as the ranks of one life of an engine see them: where they look in time."""

from collections.abc import Callable

from kvgrpc.core.actions import AwaitEnd, UnmapPeer
from kvgrpc.core.events import ProcessEnded

Reaches = Callable[[int, str], bool]
"""Whether a rank reaches the memory of a peer's life: only then it knows the process to look at."""


class Ends:
    """`report` takes what the ranks see."""

    def __init__(self, reaches: Reaches, report: Callable[[ProcessEnded], None]) -> None:
        self._reaches = reaches
        self._report = report
        self._looking: set[tuple[int, str]] = set()
        self._blind: set[tuple[int, str]] = set()
        """Who was to look and did not know where."""
        self._told: set[tuple[int, str]] = set()
        self._ended: dict[str, tuple[int, bool]] = {}
        """Lives whose processes are gone: how many ranks they had, and whether all that was sent has landed for sure.
        """

    def look(self, action: AwaitEnd) -> None:
        """A rank is to look for an end."""
        where = action.rank, action.peer
        if where in self._looking:
            return
        if not self._reaches(*where):
            self._blind.add(where)
            return
        self._looking.add(where)
        if action.peer in self._ended:
            self._tell(*where)

    def unmap(self, action: UnmapPeer) -> None:
        """A rank forgets a peer, and with it the process, unless it is to look for its end."""
        if not action.watch:
            self._looking.discard((action.rank, action.peer))

    def ended(self, life: str, ranks: int, *, drained: bool) -> None:
        """The processes of a life are gone; said again when what they had sent has landed."""
        self._ended[life] = ranks, drained
        for rank in range(ranks):
            if (rank, life) in self._looking:
                self._tell(rank, life)

    def missed(self, life: str) -> bool:
        """Whether a rank could have seen the end of a life, and was not asked to look."""
        ranks, _ = self._ended.get(life, (0, False))
        return any((rank, life) not in self._told | self._blind for rank in range(ranks))

    def _tell(self, rank: int, life: str) -> None:
        self._told.add((rank, life))
        _, drained = self._ended[life]
        self._report(ProcessEnded(rank, life, drained))
