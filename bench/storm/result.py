"""The result of a storm, as a table or as JSON."""

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.storm.outcomes import Expected, Outcome, wrong_from


@dataclass(frozen=True)
class Left:
    """The state once the storm is over."""

    held: Mapping[str, int]
    """Number of each engine's blocks that are not free."""
    settled_s: float | None
    """Seconds until none was held; None if some still are."""
    reclaimed: int | None
    """Number of leases that P and D reclaimed; None if their connector reclaims none. A killed D loses its count."""
    reclaimed_in_vain: int | None
    """Number of reclaimed leases whose reader came later."""


@dataclass(frozen=True)
class Found:
    """The result of one connector."""

    sent: int
    answers: int
    """Number of whole answers."""
    parts: int
    """Number of answers with some tokens that ended early: their client hung up, or something failed."""
    wrong: int
    """Number of whole and partial answers with a wrong token."""
    wrong_at_first: int
    """Number of answers whose first token is already wrong."""
    wrong_from: tuple[int, ...]
    """Position of the first wrong token of each."""
    wrong_requests: tuple[int, ...]
    statuses: Mapping[str, int]
    median_s: float | None
    """Median time of whole answers in seconds, from sending to the last token. None if there is none."""
    p95_s: float | None
    slowest_s: float | None
    slowest_requests: tuple[int, ...]
    kills: int
    storm_s: float
    held: int
    held_at: Mapping[str, int]
    settled_s: float | None
    reclaimed: int | None
    reclaimed_in_vain: int | None


def found(outcomes: Sequence[Outcome], expected: Expected, left: Left, *, kills: int, storm_s: float) -> Found:
    """Returns the summary of a storm. `kills` is the number of times that D was killed."""
    whole = sorted((outcome for outcome in outcomes if outcome.answered), key=lambda outcome: outcome.seconds)
    seconds = [outcome.seconds for outcome in whole]
    firsts = {one.request.number: at for one in outcomes if (at := wrong_from(one, expected)) is not None}
    return Found(
        sent=len(outcomes),
        answers=len(whole),
        parts=sum(bool(outcome.tokens) and not outcome.answered for outcome in outcomes),
        wrong=len(firsts),
        wrong_at_first=sum(at == 0 for at in firsts.values()),
        wrong_from=tuple(firsts.values()),
        wrong_requests=tuple(firsts),
        statuses=dict(sorted(Counter(outcome.status for outcome in outcomes).items())),
        median_s=_rounded(statistics.median(seconds)) if seconds else None,
        p95_s=_rounded(seconds[-(-len(seconds) * 95 // 100) - 1]) if seconds else None,
        slowest_s=_rounded(seconds[-1]) if seconds else None,
        slowest_requests=tuple(outcome.request.number for outcome in whole[:-6:-1]),
        kills=kills,
        storm_s=_rounded(storm_s),
        held=sum(left.held.values()),
        held_at=left.held,
        settled_s=left.settled_s,
        reclaimed=left.reclaimed,
        reclaimed_in_vain=left.reclaimed_in_vain,
    )


def as_json(by_connector: Mapping[str, Found], ran: Mapping[str, Any]) -> str:
    """Returns one object: the first connector's result, each connector's under its name, and what ran."""
    each = {name: asdict(one) for name, one in by_connector.items()}
    return json.dumps(next(iter(each.values())) | each | dict(ran))


def table(by_connector: Mapping[str, Found], ran: Mapping[str, Any]) -> list[str]:
    """Returns a table with a column for each connector."""
    rows = [asdict(one) for one in by_connector.values()]
    lines = [f"{'':<18}" + "".join(f"{name:>30}" for name in by_connector)]
    for field in rows[0]:
        lines.append(f"{field:<18}" + "".join(f"{_cell(row[field]):>30}" for row in rows))
    return [*lines, *(f"{name}: {value}" for name, value in ran.items())]


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{name}:{count}" for name, count in value.items())
    if isinstance(value, tuple):
        return ",".join(map(str, value[:5])) + (",..." if value[5:] else "")
    return "-" if value is None else str(value)


def _rounded(seconds: float) -> float:
    return round(seconds, 3)
