"""Compares two stored results."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.results.stored import rows
from bench.results.wording import number, words

NOISE = 0.15
"""Change, as a fraction, that counts as noise where a result has no spread of its repeats."""


@dataclass(frozen=True)
class Change:
    """One figure of two results."""

    name: str
    a: float
    b: float
    ratio: float
    """B over A."""
    noise: float
    """Change, as a fraction, that repeats alone explain: the wider spread of both, or `NOISE`."""
    recorded: bool
    """True if `noise` is of recorded repeats."""
    slowdown: float
    """Above 1 if B is worse than A."""
    verdict: str
    """better, worse or same."""


def compare(a: dict[str, Any], b: dict[str, Any]) -> list[Change]:
    """Returns the figures that both results have."""
    before, after = rows(a), rows(b)
    found = []
    for name in (name for name in before if name in after):
        one, other = before[name], after[name]
        spreads = [spread for spread in (one.spread, other.spread) if spread is not None]
        noise = max(spreads, default=NOISE)
        ratio = other.value / one.value
        slowdown = 1 / ratio if one.rises else ratio
        beyond = max(slowdown, 1 / slowdown) > 1 + noise
        verdict = "same" if not beyond else "worse" if slowdown > 1 else "better"
        found.append(Change(name, one.value, other.value, ratio, noise, bool(spreads), slowdown, verdict))
    return found


def to_json(changes: Sequence[Change]) -> dict[str, Any]:
    """Returns the comparison for programs."""
    return {"noise_without_repeats": NOISE, "rows": [asdict(change) for change in changes]}


def show_changes(changes: Sequence[Change], console: Console) -> None:
    """Prints the verdict and the comparison."""
    counts = {verdict: sum(change.verdict == verdict for change in changes) for verdict in ("better", "worse", "same")}
    console.print(
        f"B beside A: {counts['better']} better, {counts['worse']} worse, {counts['same']} within noise",
        highlight=False,
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("figure", overflow="fold")
    for column in ("A", "B", "B/A", "noise"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for change in changes:
        noise = f"{change.noise * 100:.0f} %" + ("" if change.recorded else " *")
        mark = "" if change.verdict == "same" else change.verdict
        case, _, figure = change.name.rpartition(": ")
        name = f"{case}: {words(figure)}" if case else words(figure)
        table.add_row(name, number(change.a), number(change.b), f"{change.ratio:.2f}", noise, mark)
    console.print(table)
    if not all(change.recorded for change in changes):
        console.print(f"* no repeats recorded: {NOISE * 100:.0f} % counts as noise", highlight=False)
