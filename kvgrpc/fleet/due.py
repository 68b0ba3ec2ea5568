"""Keys by the times at which they are due, where times change far more often than they are over."""

from heapq import heappop, heappush


class DueKeys:
    """Keys, each with the time at which somebody has to look at it. A time that becomes later costs nothing: whoever
    looks at the earlier one sets the later one.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._times: dict[str, float] = {}
        """Time of each key. The heap may have others of the same key, which do not count."""

    def set(self, key: str, at: float) -> None:
        """Has a key be due at a time, unless it is due earlier anyway."""
        known = self._times.get(key)
        if known is None or at < known:
            self._times[key] = at
            heappush(self._heap, (at, key))

    def take(self, now: float) -> list[str]:
        """Takes out the keys that are due, the earliest first."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            at, key = heappop(self._heap)
            if self._times.get(key) == at:
                del self._times[key]
                found.append(key)
        return found
