"""Attached engines over the data path window: two ranks with memory of their own, layers, and a shared pool."""

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from kvgrpc.engine import LayersReceived, Received, content
from tests.engine.conftest import SETTINGS
from tests.engine.private_side import PrivateSide, Teams
from tests.engine.ranks.moves import PROMPT, SOURCE, TARGET, Way, begun, check_pull, check_push
from tests.engine.support import Lead, Side, received
from tests.service.conftest import TEST_S

pytestmark = pytest.mark.timeout(TEST_S)

WAY = Way("window")


@pytest.fixture(scope="module")
def window_leads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lead, Lead]]:
    """Runs leads whose peers never map a pool."""
    folder = tmp_path_factory.mktemp("leads")
    with ExitStack() as stack:
        p, d = (Lead(folder, name, "--data-paths", "window", settings=SETTINGS) for name in ("P", "D"))
        for lead in (p, d):
            stack.callback(lead.close)
        yield p.wait_ready(), d.wait_ready()


def test_each_rank_gets_its_own_blocks_and_no_others(
    stack: ExitStack, window_leads: tuple[Lead, Lead], teams: Teams
) -> None:
    source, destination = (PrivateSide(lead, team, "window") for lead, team in zip(window_leads, teams, strict=True))
    stack.callback(source.close)
    stack.callback(destination.close)
    for seed in (100, 200):  # the second transfer reuses the first one's windows
        check_pull(source, destination, WAY, seed)
        check_push(source, destination, WAY, seed + 10)


def test_layers_of_a_push_come_as_the_ranks_have_written_them(
    stack: ExitStack, window_leads: tuple[Lead, Lead], teams: Teams
) -> None:
    source, destination = (PrivateSide(lead, team, "window") for lead, team in zip(window_leads, teams, strict=True))
    stack.callback(source.close)
    stack.callback(destination.close)
    push, reservation = begun(source, destination, TARGET, PROMPT)
    expected = source.fill_all(SOURCE, 700)
    push.finished(SOURCE, layers=(0, 1))
    source.engine.flush()
    (event,) = destination.poll_until(bool)
    assert isinstance(event, LayersReceived)
    push.finished(SOURCE, layers=(1, 1), last=True)
    source.engine.flush()
    assert isinstance(destination.poll_until(lambda _: reservation.over)[-1], Received)
    assert destination.read_all(TARGET) == expected


def test_a_shared_pool_goes_through_windows_where_its_lead_has_no_other_path(
    stack: ExitStack, window_leads: tuple[Lead, Lead]
) -> None:
    source, destination = (Side(lead) for lead in window_leads)
    stack.callback(source.close)
    stack.callback(destination.close)
    made = source.fill(SOURCE, seed=3)
    handover = source.hand_over(SOURCE, PROMPT)
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    pull.start(TARGET)
    received(destination.finish(pull))
    assert np.array_equal(destination.read(TARGET), made)
