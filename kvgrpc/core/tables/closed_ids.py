"""Ids of accesses that are over, so that a late message does not open one again: nothing would close it.

An id is remembered for one to two registration timeouts. The table is no `remembered.Remembered`: every access of a
peer adds an id, so only ids are kept, without times and weights, in two generations that are forgotten whole.
"""


class ClosedAccessIds:
    """Used access ids, at most `most` in each generation."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._younger: set[bytes] = set()
        self._older: set[bytes] = set()

    def add(self, access_id: bytes) -> bool:
        """Adds an access that is over. When there are too many, the older half is forgotten early. Returns True when a
        generation begins, whose timer must be set.
        """
        if len(self._younger) >= self._most:
            self.turn()
        self._younger.add(access_id)
        return len(self._younger) == 1

    def turn(self) -> bool:
        """Ends a generation. Returns True when another one begins, whose timer must be set."""
        self._older, self._younger = self._younger, set()
        return bool(self._older)

    def __contains__(self, access_id: bytes) -> bool:
        return access_id in self._younger or access_id in self._older
