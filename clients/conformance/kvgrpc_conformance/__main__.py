"""Plays the cases: `python -m kvgrpc_conformance`.

Exit codes: 0 all cases passed, 1 some failed, 2 wrong arguments or cases.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # read when gRPC is first used: it warns of forks that never happen

from . import cases as suite, languages as known, report
from .run import LanguageRun, Run, silent
from .values import CaseError


def main() -> int:
    """Reads the arguments, plays the cases, and reports."""
    options = _arguments()
    try:
        chosen = suite.load()
    except CaseError as error:
        return _refuse(str(error))
    faults = [f"{case.name}: {line}" for case in chosen for line in suite.faults(case)]
    if faults:
        return _refuse("\n".join(faults))
    if options.cases:
        wanted = options.cases.split(",")
        chosen = [case for case in chosen if any(word in case.name or word in case.area for word in wanted)]
    if options.list:
        print("\n".join(f"{case.area:12} {case.name}: {case.title}" for case in chosen))
        return 0
    found = {language.name: language for language in known.load()}
    names = options.languages.split(",") if options.languages else list(found)
    required = options.require.split(",") if options.require else []
    unknown = [name for name in (*names, *required) if name not in found]
    if unknown or not chosen:
        return _refuse(f"unknown: {', '.join(unknown)}" if unknown else "no case is called so")
    # Cases that share servers follow one another, so that their servers are started once.
    groups = {case.group: i for i, case in reversed(list(enumerate(chosen)))}
    chosen.sort(key=lambda case: groups[case.group])
    with tempfile.TemporaryDirectory(prefix="kvgrpc-conformance-", ignore_cleanup_errors=True) as folder:
        run = Run(chosen, Path(folder), build=options.build, told=_tell if options.verbose else silent)
        try:
            runs = asyncio.run(_played(run, [found[name] for name in names]))
        except asyncio.CancelledError:
            return _refuse("it was told to end")
    return _report(runs, required, options)


async def _played(run: Run, chosen: list[known.Language]) -> list[LanguageRun]:
    """Plays the chosen languages. It ends its servers and executors even when it is told to end."""
    task = asyncio.ensure_future(run.languages(chosen))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def _report(runs: list[LanguageRun], required: list[str], options: argparse.Namespace) -> int:
    if options.json:
        print(report.as_json(runs))
    else:
        failures = report.failures(runs)
        if failures:
            print(failures, end="\n\n")
        print(report.table(runs))
    if options.write_matrix:
        report.write_matrix(runs)
    missing = [run.language for run in runs if run.why and run.language in required]
    return int(bool(missing) or any(run.failed for run in runs))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kvgrpc_conformance", description=__doc__)
    parser.add_argument("--languages", default="", help="only these, separated by commas")
    parser.add_argument("--require", default="", help="fail when one of these is skipped")
    parser.add_argument("--cases", default="", help="only cases whose name or area has one of these words")
    parser.add_argument("--no-build", dest="build", action="store_false", help="use clients as they are built")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--write-matrix", action="store_true", help="write the table into clients/README.md")
    parser.add_argument("--list", action="store_true", help="print the cases and end")
    parser.add_argument("--verbose", action="store_true", help="say of each case when it ends")
    return parser.parse_args()


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _refuse(why: str) -> int:
    print(why, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
