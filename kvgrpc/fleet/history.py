"""The rows that readers of a directory see, numbered by revision, so that a reader can go on where it was.

A row is an entry with the state of its engine. The history keeps the last changes. A reader that was away for longer
gets all rows again.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from kvgrpc.fleet.directory import Directory, EngineState, ListedEngine
from kvgrpc.fleet.entry import EngineEntry

CHANGES_MAX = 8_192
"""Maximum number of changes that are kept."""


@dataclass(frozen=True, slots=True)
class EngineRow:
    """An entry with what is known of its engine."""

    key: str
    number: int
    """Place among all rows: a row that was seen later has a greater one."""
    entry: EngineEntry
    state: EngineState
    why: str
    listed: ListedEngine = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class RowChange:
    """A row before and after one revision; None: there was none, or there is none any more."""

    revision: int
    before: EngineRow | None
    after: EngineRow | None


@dataclass(frozen=True)
class RowNews:
    """The changes that a reader has to hear of: rows as they are now, and keys of rows that it must forget."""

    rows: tuple[EngineRow, ...]
    gone: tuple[str, ...]


Shows = Callable[[EngineRow], bool]
"""Says whether a reader sees a row."""


class EngineHistory:
    """The rows of one directory."""

    def __init__(self, directory: Directory, most: int = CHANGES_MAX) -> None:
        self.directory = directory
        self._rows: dict[str, EngineRow] = {}
        self._changes: deque[RowChange] = deque(maxlen=most)
        self._counts: Counter[tuple[str | None, EngineState]] = Counter()
        """Number of rows by tenant and state; those of None are of all tenants."""
        self._numbers = 0
        self.revision = 0
        """Number of the last change."""

    def look(self, now: float) -> bool:
        """Notes what has changed in the directory. Returns whether anything has."""
        before = self.revision
        for key in self.directory.take_touched(now):
            one, known = self.directory.listed_at(key), self._rows.get(key)
            if one is not None:
                self._numbers += known is None
                number = self._numbers if known is None else known.number
                state, why = self.directory.state(one, now), self.directory.why(one, now)
                row = EngineRow(key, number, one.entry, state, why, one)
                if known != row or known.listed is not one:
                    self._note(known, row)
            elif known is not None:
                self._note(known, None)
        return self.revision > before

    def rows(self, shows: Shows) -> list[EngineRow]:
        """Returns the rows that a reader sees, in the order in which they were first seen."""
        return sorted(filter(shows, self._rows.values()), key=lambda row: row.number)

    def by_key(self) -> Mapping[str, EngineRow]:
        """Returns all rows, by the keys of their entries."""
        return self._rows

    def counts(self, tenant: str) -> dict[EngineState, int]:
        """Returns the number of rows by state: of those that a tenant sees, or of all if it is empty."""
        seen = ("", tenant) if tenant else (None,)
        found = {state: sum(self._counts[of, state] for of in seen) for state in EngineState}
        return {state: count for state, count in found.items() if count}

    def since(self, revision: int, shows: Shows) -> RowNews | None:
        """Returns what a reader has missed since a revision; None: more than is kept, so it needs all rows."""
        if not 0 <= revision <= self.revision:
            return None
        missed = self.revision - revision  # each change has its own revision
        if missed > len(self._changes):
            return None
        first, last = dict[str, EngineRow | None](), dict[str, EngineRow | None]()
        for change in reversed(list(islice(reversed(self._changes), missed))):
            key = _key(change)
            first.setdefault(key, change.before)
            last[key] = change.after
        rows = [row for row in last.values() if row is not None and shows(row)]
        now = {row.key for row in rows}
        gone = (key for key, row in first.items() if row is not None and shows(row) and key not in now)
        return RowNews(tuple(rows), tuple(gone))

    def _note(self, before: EngineRow | None, after: EngineRow | None) -> None:
        self.revision += 1
        change = RowChange(self.revision, before, after)
        self._changes.append(change)
        if before is not None:
            self._count(before, -1)
        if after is None:
            del self._rows[_key(change)]
        else:
            self._count(after, 1)
            self._rows[after.key] = after

    def _count(self, row: EngineRow, step: int) -> None:
        for tenant in (None, row.entry.tenant):
            self._counts[tenant, row.state] += step
            if not self._counts[tenant, row.state]:
                del self._counts[tenant, row.state]


def _key(change: RowChange) -> str:
    row = change.after or change.before
    assert row is not None  # a change has at least one side
    return row.key
