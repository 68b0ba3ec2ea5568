"""Rows about ended things, remembered for a while so that a late call gets the right answer."""

from collections.abc import Hashable
from typing import Generic, TypeVar

from kvgrpc.core.tables.ledger import Ledger, RowKind

REMEMBERED_BYTES = 1_000
"""Estimated bytes of a name of usual length and how it ended."""
Name = TypeVar("Name", bound=Hashable)
Row = TypeVar("Row")


class Remembered(Generic[Name, Row]):
    """A bounded table. Past its bound the oldest row is forgotten."""

    def __init__(self, most: int, kept_s: float, ledger: Ledger | None = None, what: str = "") -> None:
        """Takes `what`, which tells its rows in the ledger from those of other tables."""
        self._most = most
        self._kept_s = kept_s
        self._ledger, self._what = ledger or Ledger(), what
        self._rows: dict[Name, tuple[float, Row]] = {}
        """Name -> time until which it is remembered, and the row; oldest first."""

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, name: Name, row: Row, now: float, nbytes: int = 0) -> None:
        """Adds a row for a name that is over now. `nbytes` are its bytes beside `REMEMBERED_BYTES`."""
        self._rows.pop(name, None)
        nbytes += REMEMBERED_BYTES
        self._ledger.keep(RowKind.TENSOR_ENDED, (self._what, name), "", nbytes)
        while self._rows and (len(self._rows) >= self._most or self._ledger.forgets(RowKind.TENSOR_ENDED)):
            self._forget(next(iter(self._rows)))
        self._rows[name] = now + self._kept_s, row

    def get(self, name: Name) -> Row | None:
        """Returns the row of a name, or None."""
        found = self._rows.get(name)
        return found[1] if found is not None else None

    def expire(self, now: float) -> None:
        """Forgets rows whose time is over."""
        while self._rows and (first := next(iter(self._rows))) and self._rows[first][0] <= now:
            self._forget(first)

    def next_deadline(self) -> float | None:
        """Returns the time at which the oldest row is to be forgotten, or None."""
        return next(iter(self._rows.values()))[0] if self._rows else None

    def _forget(self, name: Name) -> None:
        del self._rows[name]
        self._ledger.drop(RowKind.TENSOR_ENDED, (self._what, name))
