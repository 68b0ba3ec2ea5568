"""The Python client passes all cases of the conformance suite."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from clients.conformance.kvgrpc_conformance import languages
from clients.conformance.kvgrpc_conformance.cases import Case
from clients.conformance.kvgrpc_conformance.run import Run
from tests.clients.suite import OTHERS, SHARED

pytestmark = pytest.mark.timeout(600)


async def failures(cases: Sequence[Case], folder: Path) -> list[str]:
    """Plays cases and returns those that failed, with the reason."""
    (run,) = await Run(cases, folder).languages([languages.load()[0]])
    assert (run.why, len(run.outcomes)) == ("", len(cases))
    return [f"{outcome.case.name}: {outcome.failure}" for outcome in run.outcomes if outcome.failure]


async def test_cases_that_share_two_servers_pass(tmp_path: Path) -> None:
    assert await failures(SHARED, tmp_path) == []


@pytest.mark.slow
async def test_cases_with_servers_of_their_own_pass(tmp_path: Path) -> None:
    assert await failures(OTHERS, tmp_path) == []
