"""The clients in other languages build, and pass a short suite: one case of each area that needs no servers of its own.
`make conformance` plays all cases.

A language is skipped where its toolchain or packages are missing.
"""

from pathlib import Path

import pytest

from clients.conformance.kvgrpc_conformance import languages
from clients.conformance.kvgrpc_conformance.run import Run
from tests.clients.suite import SHARED

# Compilers use most of the time, and run at a lower priority than other tests.
pytestmark = pytest.mark.timeout(1_800)
SHORT = list({case.area: case for case in reversed(SHARED)}.values())
OTHERS = [language for language in languages.load() if language.name != "python"]


@pytest.mark.parametrize("language", OTHERS, ids=[language.name for language in OTHERS])
async def test_the_client_builds_and_passes_a_case_of_each_area(language: languages.Language, tmp_path: Path) -> None:
    (run,) = await Run(SHORT, tmp_path).languages([language])
    if run.why:
        pytest.skip(run.why)
    assert [outcome.failure for outcome in run.outcomes] == [""] * len(SHORT)
