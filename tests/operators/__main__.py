"""Prometheus, promtool and Jaeger, for real, beside leads that work and leads that fail; the chart, by Helm; and
the files of deploy, by hadolint and systemd.

    make operators-check                          # all parts; takes two minutes
    make operators-check ARGS=--json              # one JSON object on stdout; progress goes to stderr
    make operators-check ARGS="--parts panels"    # some parts
    make operators-check JAEGER=path              # a Jaeger of yours, in place of one that is built with Go
    make operators-check APISERVER=path           # a kube-apiserver of yours, in place of `make apiserver`'s

Exit codes: 0 all is as it should be; 1 something is not; 2 an option is not usable.
"""

import argparse
import asyncio
import json
import logging
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.operators import alerts, deploy_files, manifests, panels, traces
from tests.operators.accounting import accounted
from tests.operators.programs import TOOLS, Missing, Programs, found_in

ACCOUNTED_MIN = 0.95
"""Minimum share of a call's time that spans account for."""


def panels_part(programs: Programs, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns what the dashboard shows, and what is wrong."""
    found = asyncio.run(panels.check(programs, folder))
    wrong = [f"the panel {title} has no data: {query}" for title, query in found.empty.items()]
    wrong += [f"promtool {what}: {said}" for what, said in found.complaints.items()]
    if not found.exemplars:
        wrong.append("no exemplar has the trace id of a request")
    shown = {"panels": len(found.panels), "panels_with_data": len(found.panels) - len(found.empty)}
    return shown | {"exemplars": found.exemplars}, wrong


def rules_part(programs: Programs, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns which alerts fired, and what is wrong."""
    found = alerts.check(programs, folder)
    wrong = [f"{alert}: {why}" for alert, why in found.silent.items()]
    return {"rules": len(found.rules), "rules_fired": len(found.rules) - len(found.silent)}, wrong


def traces_part(programs: Programs, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns what the traces lack, and what is wrong."""
    found = asyncio.run(traces.check(programs, folder))
    orphans, share = found.orphans(), accounted(found.traces.values())
    wrong = [f"a span without its parent: {one}" for one in orphans]
    if share < ACCOUNTED_MIN:
        wrong.append(f"spans account for {share:.3f} of the time of calls; {ACCOUNTED_MIN} is wanted")
    if found.services != {"client", "kvgrpc"}:
        wrong.append(f"Jaeger lists the services {sorted(found.services)}")
    sys.stderr.write("".join(f"  unaccounted: {gap}\n" for gap in found.gaps()))
    shares = {name: round(one, 3) for name, one in found.shares().items()}
    phases = round(accounted(found.traces.values(), ends=False), 3)
    shown = {"orphan_spans": len(orphans), "accounted": round(share, 3), "accounted_without_ends_of_calls": phases}
    return shown | {"accounted_by_request": shares}, wrong


def manifests_part(programs: Programs, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns how many manifests the chart makes, how many of them are valid and what says so, and what is wrong."""
    found = manifests.check(programs, folder)
    shown = {"manifests": len(found.rows), "manifests_valid": found.valid, "manifests_by": found.judge}
    return shown | {"manifests_without_schema": sum(not row.known for row in found.rows)}, found.wrong


def deploy_part(programs: Programs, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns how exposed the unit of systemd is, and what is wrong with the files that start a lead elsewhere."""
    exposure, wrong = deploy_files.check(programs, folder)
    return {"unit_exposure": exposure}, wrong


PARTS: dict[str, Callable[[Programs, Path], tuple[dict[str, Any], list[str]]]] = {
    "panels": panels_part, "rules": rules_part, "traces": traces_part, "manifests": manifests_part,
    "deploy": deploy_part,
}  # fmt: skip


def parsed(arguments: list[str]) -> argparse.Namespace:
    """Returns the options. Ends the program for an unusable one."""
    parser = argparse.ArgumentParser(
        prog="make operators-check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run; default all")
    parser.add_argument("--tools", type=Path, default=TOOLS, help="folder of the programs")
    parser.add_argument("--jaeger", type=Path, help="a Jaeger of yours")
    parser.add_argument("--apiserver", type=Path, help="a kube-apiserver of yours")
    return parser.parse_args(arguments)


def main() -> int:
    """Runs, and prints."""
    options = parsed(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # who ends it from outside still ends what it started
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    programs = found_in(options.tools, options.jaeger, options.apiserver)
    result: dict[str, Any] = {}
    wrong: list[str] = []
    for name in options.parts:
        sys.stderr.write(f"... {name}\n")
        with tempfile.TemporaryDirectory(prefix="kvgrpc-operators-") as folder:
            try:
                found, bad = PARTS[name](programs, Path(folder))
            except Missing as missing:
                found, bad = {f"{name}_skipped": str(missing)}, []
        result |= found
        wrong += bad
    result["wrong"] = wrong
    rows = [f"{name:<22} {value}" for name, value in result.items() if name != "wrong"]
    sys.stdout.write((json.dumps(result) if options.json else "\n".join((*rows, *wrong))) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
