"""Ids of accesses that are over. A message that was long under way must not open one again: nothing would
close it.

Only ids are kept, in two generations, so that forgetting costs nothing: an id is remembered for at least one
registration timeout and at most two.
"""


class ClosedAccessIds:
    """Access ids that are used up, at most `most` in each generation."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._younger: set[bytes] = set()
        self._older: set[bytes] = set()

    def add(self, access_id: bytes) -> bool:
        """That access is over. When there are too many, the older half is forgotten before its time. True: a
        generation begins, whose time has to be set.
        """
        if len(self._younger) >= self._most:
            self.turn()
        self._younger.add(access_id)
        return len(self._younger) == 1

    def turn(self) -> bool:
        """A generation is over. True: another one begins, whose time has to be set."""
        self._older, self._younger = self._younger, set()
        return bool(self._older)

    def __contains__(self, access_id: bytes) -> bool:
        return access_id in self._younger or access_id in self._older
