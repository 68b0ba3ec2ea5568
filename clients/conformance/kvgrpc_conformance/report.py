"""Reports the results of a run: as a table, as JSON, and as the matrix in clients/README.md."""

import json
from collections.abc import Sequence
from pathlib import Path

from .languages import ROOT
from .run import LanguageRun
from .values import Json

README = ROOT / "clients" / "README.md"
BEGIN, END = "<!-- conformance: begin -->", "<!-- conformance: end -->"


def table(runs: Sequence[LanguageRun]) -> str:
    """Returns a table with one line for each language."""
    rows = [("language", "version", "cases", "passed", "failed", "")]
    for run in runs:
        if run.why:
            rows.append((run.language, "", "", "", "", f"SKIP: {run.why}"))
        else:
            total = len(run.outcomes)
            rows.append((run.language, run.version, str(total), str(total - run.failed), str(run.failed), ""))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join("  ".join([*(row[i].ljust(widths[i]) for i in range(5)), row[5]]).rstrip() for row in rows)


def as_json(runs: Sequence[LanguageRun]) -> str:
    """Returns the results as JSON, for programs."""
    return json.dumps({"languages": [_row(run) for run in runs], "failures": _failures(runs)}, indent=2)


def _row(run: LanguageRun) -> Json:
    total = len(run.outcomes)
    return {
        "language": run.language,
        "version": run.version,
        "cases": total,
        "passed": total - run.failed,
        "failed": run.failed,
        "skipped": bool(run.why),
        "why": run.why,
    }


def _failures(runs: Sequence[LanguageRun]) -> Json:
    return [
        {"language": run.language, "case": outcome.case.name, "title": outcome.case.title, "failure": outcome.failure}
        for run in runs
        for outcome in run.outcomes
        if outcome.failure
    ]


def failures(runs: Sequence[LanguageRun]) -> str:
    """Returns everything that is known of each failed case."""
    found = [(run, outcome) for run in runs for outcome in run.outcomes if outcome.failure]
    return "\n\n".join(f"{run.language}: {outcome.case.title}\n{outcome.failure}" for run, outcome in found)


def matrix(runs: Sequence[LanguageRun]) -> str:
    """Returns the passed cases of all, with one row for each area and one column for each language."""
    areas = list(dict.fromkeys(outcome.case.area for run in runs for outcome in run.outcomes))
    heads = [f"{run.language} {run.version}".strip() for run in runs]
    lines = [f"| area | {' | '.join(heads)} |", f"|---|{'---|' * len(runs)}"]
    for area in areas:
        lines.append(f"| {area} | {' | '.join(_cell(run, area) for run in runs)} |")
    return "\n".join(lines)


def _cell(run: LanguageRun, area: str) -> str:
    of_area = [outcome for outcome in run.outcomes if outcome.case.area == area]
    if run.why or not of_area:
        return "not run"
    passed = sum(not outcome.failure for outcome in of_area)
    return f"{passed} of {len(of_area)}"


def write_matrix(runs: Sequence[LanguageRun], path: Path = README) -> None:
    """Writes the matrix between its two markers. Raises ValueError where they are missing."""
    text = path.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no place for the matrix: {BEGIN} and {END}")
    path.write_text(f"{before}{BEGIN}\n\n{matrix(runs)}\n\n{END}{after}")
