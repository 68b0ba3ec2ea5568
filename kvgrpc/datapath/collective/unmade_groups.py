"""Limits on process groups that are being made or were never made, per peer and in all.

The other rank of a group may never come, and a library that waits for it holds threads and descriptors meanwhile. So a
group is begun only if few others wait, and if the reserve of descriptors stays untouched. Only the mover's thread uses
this module.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvgrpc.datapath.base import DataPathFailed
from kvgrpc.datapath.collective.group import DESCRIPTORS, ProcessGroup
from kvgrpc.open_files import spare

OF_PAIR_MAX = 8
"""Maximum number of groups of two ranks and one direction that are being made or failed lately."""
OF_PEER_MAX = 16
"""Maximum number of groups that are being made with all ranks of a peer."""
OF_NEW_PEERS_MAX = 32
"""Maximum number of groups that are being made with peers whose ranks have not come yet."""
MAKING_MAX = 48
"""Maximum number of groups of a rank that are being made."""
LATELY_S = 30.0
Pair = tuple[str, int, bool]
"""A peer, a rank of it, and True if this rank sends."""


@dataclass(frozen=True, eq=False)
class _BegunGroup:
    pair: Pair
    group: ProcessGroup

    @property
    def peer(self) -> str:
        return self.pair[0]


class UnmadeGroups:
    """Groups of one rank in the making. If there are too many, the first that only waits for its peer ends."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun: list[_BegunGroup] = []
        self._failed: deque[tuple[float, Pair]] = deque()
        """Failed groups with the time at which they had failed, the earliest first."""
        self._known: set[str] = set()
        """Peers of which a rank has come."""

    def check(self, pair: Pair) -> None:
        """Raises DataPathFailed if no other group may be begun now."""
        self._look()
        peer = pair[0]
        of_pair = sum(begun.pair == pair for begun in self._begun) + sum(failed == pair for _, failed in self._failed)
        if of_pair >= OF_PAIR_MAX:
            raise DataPathFailed(
                f"{of_pair} process groups with this rank are being made or came to nothing in the last "
                f"{LATELY_S:g} s: look why its half does not come, and try again after that time"
            )
        if sum(begun.peer == peer for begun in self._begun) >= OF_PEER_MAX:
            raise DataPathFailed(f"{OF_PEER_MAX} process groups with this peer are being made: try again in a moment")
        if peer not in self._known:
            self._make_room([begun for begun in self._begun if begun.peer not in self._known], OF_NEW_PEERS_MAX)
        self._make_room(self._begun, MAKING_MAX)
        if not spare(DESCRIPTORS):
            raise DataPathFailed(
                "a process group needs more open files than this process has to spare: raise its limit"
            )

    def add(self, pair: Pair, group: ProcessGroup) -> None:
        self._begun.append(_BegunGroup(pair, group))

    def forget(self, peer: str) -> None:
        """Forgets a peer whose life is over."""
        self._look()
        self._known.discard(peer)

    def _make_room(self, among: list[_BegunGroup], most: int) -> None:
        if len(among) < most:
            return
        first = next((begun for begun in among if begun.group.awaits_half), None)
        if first is None:
            raise DataPathFailed(f"{most} process groups of this rank are being made: try again in a moment")
        first.group.abort("the peer did not answer while others came")
        self._begun.remove(first)
        self._failed.append((self._clock(), first.pair))

    def _look(self) -> None:
        """Updates what became of the groups."""
        now, begun = self._clock(), self._begun
        self._known.update(one.peer for one in begun if one.group.made)
        self._failed.extend((now, one.pair) for one in begun if one.group.ended and not one.group.made)
        self._begun = [one for one in begun if not (one.group.made or one.group.ended)]
        while self._failed and self._failed[0][0] <= now - LATELY_S:
            self._failed.popleft()
