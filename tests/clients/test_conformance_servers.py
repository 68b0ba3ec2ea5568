"""The Python client passes the conformance cases that have servers of their own."""

import pytest

from clients.conformance.kvgrpc_conformance.cases import Case
from clients.conformance.kvgrpc_conformance.run import Outcome
from tests.clients.playing import OTHERS, played

# All cases are played together, so the first test waits for all of them.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return played(OTHERS, tmp_path_factory.mktemp("conformance"))


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
def test_the_python_client_conforms(case: Case, outcomes: dict[str, Outcome]) -> None:
    assert not outcomes[case.name].failure, outcomes[case.name].failure
