"""The directory: the engines that a source lists, and what is known of each.

A source is a registry as its watch tells it: a listing, then changes, then a break, then a listing again. A listing
says what there is, so what it lacks is gone. After a break the last list stays in use and is stale.

An entry is not alive. An engine is used only after its lead has answered a health check, and a failure puts it out of
use at once. Nor is an entry a proof: whoever writes to the registry may name any engine id and any life. So a life
takes the place of an older one, or of another entry with its id, only once it has answered.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from kvgrpc.errors import InvalidRequest, invalid
from kvgrpc.fleet.due import DueKeys
from kvgrpc.fleet.entry import EngineEntry, read_entry

KEY_BYTES_MAX = 600
"""Maximum size of a key, in bytes."""


class EngineState(StrEnum):
    """Knowledge of one engine."""

    UNPROVEN = "unproven"
    """No health check has been answered, or the last answer is too old."""
    HEALTHY = "healthy"
    FAILED = "failed"
    DRAINING = "draining"
    OUTLIVED = "outlived"
    """A newer life of the same engine id has answered."""


@dataclass(frozen=True)
class DirectoryLimits:
    """The bounds and times of a directory."""

    entries: int = 4_096
    outlived: int = 8_192
    """Maximum number of engine ids whose newest life that answered is remembered."""
    check_every_s: float = 5.0
    retry_s: float = 1.0
    """Time between two checks of an engine that failed, or that no check has proved."""
    proof_s: float = 15.0
    """Time for which an answered health check counts."""


@dataclass(slots=True)
class ListedEngine:
    """An entry of the source, with what is known of its engine."""

    key: str
    entry: EngineEntry
    revision: int
    failed: bool = False
    proved_at: float = -math.inf
    check_at: float = -math.inf
    """Time at which the next check is due."""
    load: float = 0.0
    """Load that was last told: 0 is idle, 1 is busy."""
    picks: float = 0.0
    """Number of recent picks of this engine, which `load` does not have yet."""
    picked_at: float = -math.inf
    takes_work: bool = True
    """False when the engine's lead said that it takes no new work."""
    why: str = ""
    """Reason why the last check failed; empty if it did not."""


@dataclass(frozen=True)
class LeadAnswer:
    """The answer of a lead to a health check, beside whether it serves as the engine that was asked for."""

    load: float = 0.0
    takes_work: bool = True
    why: str = ""
    """Reason why the check failed; empty if it did not."""


@dataclass(frozen=True)
class HealthCheck:
    """A check that is due: the lead at `address` is asked whether it serves, and which engine it is."""

    key: str
    engine_id: str
    incarnation: int
    address: str


@dataclass
class Refusals:
    """Number of entries and changes that the directory did not take, by cause."""

    unreadable: int = 0
    too_many: int = 0
    outdated: int = 0
    last: str = ""
    """Fault of the last unreadable entry."""


@dataclass
class Directory:
    """The engines of one source."""

    limits: DirectoryLimits = field(default_factory=DirectoryLimits)
    refusals: Refusals = field(default_factory=Refusals)

    def __post_init__(self) -> None:
        self._engines: dict[str, ListedEngine] = {}
        self._by_id: dict[str, set[str]] = {}
        self._newest: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._stale_since: float | None = None
        self._listed = False
        self._touched: dict[str, None] = {}
        """Keys of entries that may look otherwise than before, in the order of the changes."""
        self._checks, self._proofs = DueKeys(), DueKeys()
        self._latest, self._behind = -math.inf, False
        """Latest time that was told, and whether a later call told an earlier one: then any state may have changed."""

    # -- what the source tells

    def listed(self, values: Iterable[tuple[str, bytes, int]]) -> None:
        """Takes a listing of (key, value, revision): what it lacks is gone."""
        there: set[str] = set()
        for key, value, revision in values:
            there.add(key)
            known = self._engines.get(key)
            if known is not None:
                known.revision = -1  # a registry that starts anew counts from the beginning
            self._take(key, value, revision)
        for key in [key for key in self._engines if key not in there]:
            self._drop(key)
        self._listed, self._stale_since = True, None

    def changed(self, key: str, value: bytes, revision: int) -> None:
        """Takes one new or changed entry."""
        self._take(key, value, revision)

    def removed(self, key: str, revision: int) -> None:
        known = self._engines.get(key)
        if known is None:
            return
        if revision < known.revision:
            self.refusals.outdated += 1
            return
        self._drop(key)

    def broken(self, now: float) -> None:
        """Marks the list as stale: the source is down. Nothing is dropped."""
        if self._stale_since is None:
            self._stale_since = now

    def stale_s(self, now: float) -> float | None:
        """Returns the age of a list that is stale, in seconds; None: the list is the source's own."""
        return None if self._stale_since is None else max(0.0, now - self._stale_since)

    @property
    def complete(self) -> bool:
        """True after the first listing."""
        return self._listed

    # -- what engines tell

    def checks_due(self, now: float) -> list[HealthCheck]:
        """Returns the checks to make now. Each engine's next check is due later."""
        due = []
        for key in self._checks.take(now):
            one = self._engines.get(key)
            if one is None or self._outlived(one):
                continue  # one that is outlived no longer is touched
            if one.check_at > now:
                self._checks.set(key, one.check_at)
                continue
            self._check_at(one, now + (self.limits.check_every_s if self._proved(one, now) else self.limits.retry_s))
            entry = one.entry
            due.append(HealthCheck(one.key, entry.engine_id, entry.incarnation, entry.addresses[0]))
        return due

    def answered(self, check: HealthCheck, now: float) -> None:
        """Notes that the engine answered that it serves."""
        one = self._of(check)
        if one is None:
            return
        if not self._proved(one, now):
            self._touch(one.entry.engine_id)
        self._behind |= now < self._latest
        self._latest = max(now, self._latest)
        one.failed, one.proved_at = False, now
        self._check_at(one, now + self.limits.check_every_s)
        self._proofs.set(one.key, now + self.limits.proof_s)
        self._remember(one.entry)

    def failed(self, check: HealthCheck, now: float) -> None:
        """Puts an engine out of use: it does not answer, does not serve, or is another engine."""
        one = self._of(check)
        if one is not None:
            self._fail(one, now)

    def heard(self, check: HealthCheck, answer: LeadAnswer, now: float) -> None:
        """Notes what a lead said of its engine. Whether the engine may be used follows by `answered` or `failed`."""
        one = self._of(check)
        if one is None:
            return
        if (one.takes_work, one.why) != (answer.takes_work, answer.why):
            one.takes_work, one.why = answer.takes_work, answer.why
            self._touch(one.entry.engine_id)
        if not answer.why:
            one.load, one.picks, one.picked_at = answer.load, 0.0, now

    def doubted(self, check: HealthCheck, now: float) -> None:
        """Brings the engine's next check forward: the connection to its lead has ended. A lead that ends each one is
        asked as often as one that fails.
        """
        one = self._of(check)
        if one is not None:
            self._check_at(one, min(one.check_at, max(now, one.proved_at + self.limits.retry_s)))

    def loaded(self, engine_id: str, load: float, now: float) -> None:
        """Notes the load of an engine. Raises InvalidRequest for a load that is no number from 0."""
        if not 0 <= load < math.inf:
            raise invalid("load", f"is a number from 0, not {load}")
        one = self.find(engine_id)
        if one is not None:
            one.load, one.picks, one.picked_at = load, 0.0, now

    # -- what readers ask

    def __len__(self) -> int:
        return len(self._engines)

    def __iter__(self) -> Iterator[ListedEngine]:
        return iter(self._engines.values())

    def find(self, engine_id: str) -> ListedEngine | None:
        """Returns the newest life of an engine that has answered; if none has, the newest that is listed."""
        keys = [key for key in self._by_id.get(engine_id, ()) if not self._outlived(self._engines[key])]
        return self._engines[max(keys, key=self._standing)] if keys else None

    def state(self, one: ListedEngine, now: float) -> EngineState:
        """Returns what is known of an engine at `now`."""
        if self._outlived(one):
            return EngineState.OUTLIVED
        if one.failed:
            return EngineState.FAILED
        if one.entry.draining or not one.takes_work:
            return EngineState.DRAINING
        return EngineState.HEALTHY if self._proved(one, now) else EngineState.UNPROVEN

    def why(self, one: ListedEngine, now: float) -> str:
        """Returns why an engine is not healthy, for people; empty if it is."""
        match self.state(one, now):
            case EngineState.HEALTHY:
                return ""
            case EngineState.OUTLIVED:
                return "a newer life of this engine id has answered"
            case EngineState.DRAINING:
                return "the engine takes no new work"
            case EngineState.FAILED | EngineState.UNPROVEN:
                return one.why or "no health check has been answered"

    def listed_at(self, key: str) -> ListedEngine | None:
        return self._engines.get(key)

    def take_touched(self, now: float) -> list[str]:
        """Returns the keys of entries that may look otherwise at `now` than when this was last called, those that are
        gone included. Only one reader calls this: the directory forgets them.
        """
        behind = now < self._latest
        if behind or self._behind:
            self._touched |= dict.fromkeys(self._engines)
        self._behind, self._latest = behind, max(now, self._latest)
        for key in self._proofs.take(now):
            one = self._engines.get(key)
            until = -math.inf if one is None else one.proved_at + self.limits.proof_s
            if until >= now:
                self._proofs.set(key, until)
            elif one is not None:
                self._touched[key] = None
        touched, self._touched = list(self._touched), {}
        return touched

    # -- inside

    def _take(self, key: str, value: bytes, revision: int) -> None:
        known = self._engines.get(key)
        if known is not None and revision <= known.revision:
            self.refusals.outdated += 1
            return
        try:
            if len(key.encode(errors="replace")) > KEY_BYTES_MAX:
                raise invalid("key", f"has at most {KEY_BYTES_MAX} bytes")
            entry = read_entry(value)
        except InvalidRequest as error:
            self.refusals.unreadable += 1
            self.refusals.last = str(error)
            self._drop(key)  # what the key said before is no longer said
            return
        if known is not None and known.entry.engine_id == entry.engine_id and known.entry.order > entry.order:
            self.refusals.outdated += 1
            return
        if known is None and len(self._engines) >= self.limits.entries:
            self.refusals.too_many += 1
            return
        self._put(key, entry, revision)

    def _put(self, key: str, entry: EngineEntry, revision: int) -> None:
        known = self._engines.get(key)
        same = known is not None and known.entry.order == entry.order and known.entry.engine_id == entry.engine_id
        if known is not None and same and known.entry.addresses == entry.addresses:
            known.revision = revision
            if known.entry != entry:
                known.entry = entry
                self._touch(entry.engine_id)
            return
        self._drop(key)
        self._engines[key] = ListedEngine(key, entry, revision)
        self._by_id.setdefault(entry.engine_id, set()).add(key)
        self._touch(entry.engine_id)

    def _drop(self, key: str) -> None:
        known = self._engines.pop(key, None)
        if known is None:
            return
        keys = self._by_id[known.entry.engine_id]
        keys.discard(key)
        if not keys:
            del self._by_id[known.entry.engine_id]
        self._touched[key] = None
        self._touch(known.entry.engine_id)

    def _touch(self, engine_id: str) -> None:
        """Notes that entries of an engine id may look otherwise: the state of each depends on the others."""
        for key in self._by_id.get(engine_id, ()):
            self._touched[key] = None
            self._checks.set(key, self._engines[key].check_at)

    def _check_at(self, one: ListedEngine, at: float) -> None:
        one.check_at = at
        self._checks.set(one.key, at)

    def _proved(self, one: ListedEngine, now: float) -> bool:
        # A time in the future proves nothing: the caller's clock went back.
        return one.proved_at <= now <= one.proved_at + self.limits.proof_s

    def _remember(self, entry: EngineEntry) -> None:
        """Remembers a life that answered, if it is the newest one of its engine id."""
        known = self._newest.get(entry.engine_id)
        if known is None or known < entry.order:
            self._newest[entry.engine_id] = entry.order
            self._touch(entry.engine_id)
        self._newest.move_to_end(entry.engine_id)
        if len(self._newest) > self.limits.outlived:
            self._touch(self._newest.popitem(last=False)[0])

    def _outlived(self, one: ListedEngine) -> bool:
        """Returns whether a newer life of its engine has answered, now or earlier, or another entry for the same."""
        engine_id = one.entry.engine_id
        if one.entry.order < self._newest.get(engine_id, one.entry.order):
            return True
        keys = self._by_id[engine_id]
        own = one.entry.order, one.key
        return len(keys) > 1 and any(self._standing(key) > (True, *own) for key in keys)

    def _standing(self, key: str) -> tuple[bool, tuple[int, int], str]:
        """Returns the place of an entry among those of its engine id: the greatest is the one that counts."""
        one = self._engines[key]
        return one.proved_at > -math.inf, one.entry.order, key

    def _of(self, check: HealthCheck) -> ListedEngine | None:
        """Returns the engine that was checked, if its entry is still the same."""
        one = self._engines.get(check.key)
        if one is None or (one.entry.incarnation, one.entry.addresses[0]) != (check.incarnation, check.address):
            return None
        return one

    def _fail(self, one: ListedEngine, now: float) -> None:
        if not one.failed:
            self._touch(one.entry.engine_id)
        one.failed, one.proved_at = True, -math.inf
        self._check_at(one, now + self.limits.retry_s)
