"""Plays cases of the conformance suite with the Python client, many on the same servers."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from clients.conformance.kvgrpc_conformance import languages
from clients.conformance.kvgrpc_conformance.cases import Case, load
from clients.conformance.kvgrpc_conformance.run import Outcome, Run

SUITE = load()
COMMON = next(case.group for case in SUITE if not case.own and case.servers == {"P": {}, "D": {}})
SHARED = [case for case in SUITE if case.group == COMMON and not case.own]
"""Cases that all share two servers."""
OTHERS = sorted((case for case in SUITE if case not in SHARED), key=lambda case: (case.group, case.own))
"""Cases with servers of their own, or with other settings."""


def played(cases: Sequence[Case], folder: Path) -> dict[str, Outcome]:
    """Plays the cases and returns the outcomes by case name."""
    (run,) = asyncio.run(Run(cases, folder).languages([languages.load()[0]]))
    assert not run.why
    return {outcome.case.name: outcome for outcome in run.outcomes}
