"""Remembered rows: what a late caller is told about things that are over, for a while and within a bound.

Rows of things that still live are not remembered rows: they end by their own rules. A table whose rule for forgetting
is another one says so in its docstring.
"""

from collections.abc import Hashable
from math import inf
from typing import TypeVar

from kvgrpc.core.tables.ledger import Ledger, RowKind

ROW_BYTES = 1_000
"""Estimated bytes of a row beside what its table states: its name, its error and its deadline."""
Name = TypeVar("Name", bound=Hashable)
Row = TypeVar("Row")


class Remembered(dict[Name, Row]):
    """Rows by name, oldest first, bounded by number, bytes and time.

    A row is forgotten `kept_s` after it was added last. Beyond `most` rows, or `Limits.remembered_bytes` bytes in this
    table, the oldest rows are forgotten early. The newest row always stays unless `most` is 0, so nobody is refused for
    lack of room. Readers use the table as a dictionary. Only `add`, `drop` and `expire` change it.
    """

    def __init__(
        self, most: int, kept_s: float = inf, ledger: Ledger | None = None, kind: RowKind | None = None
    ) -> None:
        """Without a `kind` its bytes are in no ledger."""
        super().__init__()
        self._most, self._kept_s = most, kept_s
        self._ledger, self._kind = ledger or Ledger(), kind
        self._kept: dict[Name, tuple[float, int]] = {}
        """Time until which each row is remembered, and its bytes, in the order of the rows."""
        self.nbytes = 0
        """Sum of the bytes of all rows. Read-only outside."""

    def enter(self, ledger: Ledger) -> None:
        """Enters all rows into a new life's ledger."""
        self._ledger = ledger
        self._weigh(self.nbytes)

    def add(self, name: Name, row: Row, now: float, nbytes: int = 0) -> None:
        """Adds or replaces a row, as the newest one. `nbytes` are its bytes beside `ROW_BYTES`."""
        nbytes += ROW_BYTES
        self.drop(name)
        if not self._most:
            return
        most_bytes = self._ledger.limits.remembered_bytes
        while self and (len(self) >= self._most or self.nbytes + nbytes > most_bytes):
            self.drop(next(iter(self)))
        self[name] = row
        self._kept[name] = now + self._kept_s, nbytes
        self.nbytes += nbytes
        self._weigh(nbytes)

    def drop(self, name: Name) -> None:
        """Forgets a row, if there is one."""
        kept = self._kept.pop(name, None)
        if kept is not None:
            del self[name]
            self.nbytes -= kept[1]
            self._weigh(-kept[1])

    def expire(self, now: float) -> None:
        """Forgets rows whose time is over."""
        while (until := self.next_deadline()) is not None and until <= now:
            self.drop(next(iter(self)))

    def next_deadline(self) -> float | None:
        """Returns the time at which the oldest row is to be forgotten, or None."""
        return next(iter(self._kept.values()))[0] if self._kept else None

    def _weigh(self, nbytes: int) -> None:
        if self._kind is not None:
            self._ledger.remember(self._kind, nbytes)
