"""Ids of accesses that are over. A message that was long under way must not open one again, when nobody would close it.

Only ids are kept, in two generations, so that forgetting costs nothing: an id is remembered for at least one
registration timeout and at most two.
"""

from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.timers import Timer


class ClosedAccessIds:
    """Access ids that are used up."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._younger: set[bytes] = set()
        self._older: set[bytes] = set()

    def add(self, access_id: bytes) -> None:
        """That access is over. When there are too many, the older half is forgotten before its time."""
        if len(self._younger) >= self._state.limits.accesses:
            self.turn()
        if not self._younger:
            self._state.timers.set(Timer.SPENT_IDS, "", self._state.now + self._state.limits.registration_timeout_s)
        self._younger.add(access_id)

    def turn(self) -> None:
        """A generation is over."""
        self._older, self._younger = self._younger, set()
        if self._older:
            self._state.timers.set(Timer.SPENT_IDS, "", self._state.now + self._state.limits.registration_timeout_s)

    def clear(self) -> None:
        """The incarnation ends: no grant of it opens anything any more."""
        self._older.clear()
        self._younger.clear()

    def __contains__(self, access_id: bytes) -> bool:
        return access_id in self._younger or access_id in self._older
