"""Engines of two ranks, of which the second connects to its lead over the network."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvgrpc.engine import content
from tests.engine.conftest import Leads
from tests.engine.private_side import PrivateSide, Teams
from tests.engine.support import received, tokens
from tests.service.conftest import TEST_S

pytestmark = pytest.mark.timeout(TEST_S)

PROMPT, SOURCE, TARGET = tokens(40), [1, 2, 9], [30, 31, 5]
REMOTE = {1: ""}


@pytest.fixture(params=("cma", "nixl"))
def pair(leads: Leads, teams: Teams, request: pytest.FixtureRequest) -> Iterator[tuple[PrivateSide, PrivateSide]]:
    with ExitStack() as stack:
        sides = []
        for lead, own in zip(leads, teams, strict=True):
            sides.append(PrivateSide(lead, own, request.param, remote=REMOTE))
            stack.callback(sides[-1].close)
        yield sides[0], sides[1]


def test_each_rank_gets_the_bytes_of_its_own_peer(pair: tuple[PrivateSide, PrivateSide]) -> None:
    source, destination = pair
    expected = source.fill_all(SOURCE, 100)
    handover = source.hand_over(SOURCE, PROMPT)
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    pull.start(TARGET)
    received(destination.finish(pull))
    source.finish(handover)
    assert destination.read_all(TARGET) == expected
