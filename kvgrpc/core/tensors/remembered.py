"""What is remembered for a while of what is over, so that a call that comes late is answered right."""

from typing import Generic, TypeVar

Name = TypeVar("Name")
Row = TypeVar("Row")


class Remembered(Generic[Name, Row]):
    """A bounded table: past its bound the oldest row is forgotten."""

    def __init__(self, most: int, kept_s: float) -> None:
        self._most = most
        self._kept_s = kept_s
        self._rows: dict[Name, tuple[float, Row]] = {}
        """Until when, and what; oldest first."""

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, name: Name, row: Row, now: float) -> None:
        """It is over now."""
        self._rows.pop(name, None)
        if len(self._rows) >= self._most:
            del self._rows[next(iter(self._rows))]
        self._rows[name] = now + self._kept_s, row

    def get(self, name: Name) -> Row | None:
        """What is remembered of it."""
        found = self._rows.get(name)
        return found[1] if found is not None else None

    def expire(self, now: float) -> None:
        """Forgets what is old."""
        while self._rows and (first := next(iter(self._rows))) and self._rows[first][0] <= now:
            del self._rows[first]

    def next_deadline(self) -> float | None:
        """When there is something to forget."""
        return next(iter(self._rows.values()))[0] if self._rows else None
