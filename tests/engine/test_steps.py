"""Order with the engine's own work: no byte is read or written before every rank is done with the named step."""

from itertools import count

import numpy as np
import pytest

from kvgrpc.engine import LeadDied, Pull, Rank, content
from kvgrpc.errors import InvalidRequest, Reason
from kvgrpc.session.v1 import rank_pb2
from tests.engine.conftest import Attach, Leads
from tests.engine.support import QUIET_S, Side, received, tokens

PROMPT = tokens(40)
SOURCE, TARGET = [1, 2, 3], [7, 8, 9]


@pytest.fixture
def pair(leads: Leads, attach: Attach) -> tuple[Side, Side]:
    """Returns two engines with two ranks each."""
    return attach(leads[0], world_size=2), attach(leads[1], world_size=2)


def _nothing_comes(side: Side, pull: Pull, waiting_for: str) -> None:
    side.lead.wait_for(side.known(pull), waiting_for)
    events = side.engine.poll(QUIET_S)
    assert [event for event in events if type(event).__name__ != "PullOpened"] == []
    assert side.lead.waits_for(pull.transfer_id) == waiting_for


def test_a_grant_is_not_opened_before_every_rank_of_the_source_has_done_its_step(pair: tuple[Side, Side]) -> None:
    source, destination = pair
    handover = source.hand_over(SOURCE, PROMPT, after_step=5)
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    pull.start(TARGET)
    _nothing_comes(destination, pull, "access")
    # The bytes that arrive are those written before the step is done.
    made = [source.fill(SOURCE, seed=rank, rank=rank) for rank in range(2)]
    source.ranks[0].step_done(5)
    source.ranks[1].step_done(4)
    source.ranks[0].step_done(9)
    _nothing_comes(destination, pull, "access")
    source.ranks[1].step_done(5)
    received(destination.finish(pull))
    for rank in range(2):
        assert np.array_equal(destination.read(TARGET, rank), made[rank])


def test_nothing_is_written_before_every_rank_of_the_destination_has_done_its_step(pair: tuple[Side, Side]) -> None:
    source, destination = pair
    made = [source.fill(SOURCE, seed=10 + rank, rank=rank) for rank in range(2)]
    before = [destination.fill(TARGET, seed=20 + rank, rank=rank) for rank in range(2)]
    handover = source.hand_over(SOURCE, PROMPT)
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    pull.start(TARGET, after_step=3)
    destination.ranks[1].step_done(3)
    _nothing_comes(destination, pull, "step")
    for rank in range(2):
        assert np.array_equal(destination.read(TARGET, rank), before[rank])
    destination.ranks[0].step_done(3)
    received(destination.poll_until(lambda _: pull.over))
    for rank in range(2):
        assert np.array_equal(destination.read(TARGET, rank), made[rank])


def test_blocks_that_are_given_later_may_name_a_step_too(pair: tuple[Side, Side]) -> None:
    source, destination = pair
    handover = source.hand_over(SOURCE, PROMPT)
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    destination.poll_until(lambda events: len(events) == 1)
    pull.start(TARGET, after_step=2)
    _nothing_comes(destination, pull, "step")
    for rank in destination.ranks:
        rank.step_done(2)
    received(destination.finish(pull))


def test_a_step_covers_all_before_it_and_a_late_report_takes_nothing_back(pair: tuple[Side, Side]) -> None:
    source, destination = pair
    for rank in source.ranks:
        rank.step_done(7)
        rank.step_done(1)
    source.round_trip()
    for step in (1, 7):
        handover = source.hand_over(SOURCE, PROMPT, after_step=step)
        pull = destination.engine.pull(handover.grant, content(PROMPT))
        pull.start(TARGET)
        received(destination.finish(pull))
        source.finish(handover)


def test_an_engine_whose_only_rank_is_in_its_process_reports_steps_with_its_calls(leads: Leads, attach: Attach) -> None:
    source, destination = attach(leads[0]), attach(leads[1])
    handover = source.hand_over(SOURCE, PROMPT, after_step=1)
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    pull.start(TARGET)
    _nothing_comes(destination, pull, "access")
    source.engine.step_done(1)
    source.engine.flush()
    received(destination.finish(pull))


def test_a_scheduler_speaks_for_no_rank_of_several(pair: tuple[Side, Side]) -> None:
    source, _ = pair
    with pytest.raises(InvalidRequest):
        source.engine.step_done(1)
    # The lead also refuses it, in case another library sends it.
    with pytest.raises(InvalidRequest) as refused:
        source.engine._lives.wait(step_done=rank_pb2.StepReport(step=1))
    assert refused.value.reason is Reason.INVALID_FIELD


def test_a_scheduler_does_not_speak_for_a_worker_that_reports_its_steps(leads: Leads, attach: Attach) -> None:
    source, destination = attach(leads[0]), attach(leads[1])
    source.ranks[0].step_done(1)
    first = source.hand_over(SOURCE, PROMPT, after_step=1)
    second = source.hand_over([4, 5, 6], PROMPT, after_step=2)
    pull = destination.engine.pull(first.grant, content(PROMPT))
    pull.start(TARGET)
    received(destination.finish(pull))
    with pytest.raises(InvalidRequest) as refused:
        source.engine._lives.wait(step_done=rank_pb2.StepReport(step=2))
    assert refused.value.reason is Reason.INVALID_FIELD
    pull = destination.engine.pull(second.grant, content(PROMPT))
    pull.start(TARGET)
    _nothing_comes(destination, pull, "access")
    source.ranks[0].step_done(2)
    received(destination.finish(pull))


def test_some_layers_of_a_step_are_not_the_step(leads: Leads, attach: Attach) -> None:
    source, destination = attach(leads[0]), attach(leads[1])
    source.ranks[0].layers_done(3, 0, 1)
    handover = source.hand_over(SOURCE, PROMPT, after_step=3)
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    pull.start(TARGET)
    _nothing_comes(destination, pull, "access")
    source.ranks[0].step_done(3)
    received(destination.finish(pull))


def test_steps_of_workers_of_an_earlier_engine_are_not_steps_of_this_one(leads: Leads, attach: Attach) -> None:
    old = attach(leads[0])
    old.engine.close()
    source, destination = attach(leads[0]), attach(leads[1])
    with pytest.raises(LeadDied):
        _report_on(old.ranks[0], first_step=100)
    handover = source.hand_over(SOURCE, PROMPT, after_step=1)
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    pull.start(TARGET)
    _nothing_comes(destination, pull, "access")
    source.ranks[0].step_done(1)
    received(destination.finish(pull))


def _report_on(rank: Rank, first_step: int) -> None:
    """Reports steps until the lead is gone."""
    for step in count(first_step):
        rank.step_done(step)


def test_a_rank_says_that_its_session_is_over(leads: Leads, attach: Attach) -> None:
    side = attach(leads[0], world_size=2)
    view = side.view(1)
    side.ranks[0].close()
    with pytest.raises(LeadDied):
        side.poll_until(lambda _: False)
    side.ranks[1].close()
    side.ranks[1].close()
    with pytest.raises(LeadDied):
        side.ranks[1].step_done(1)
    assert view.sum() == 0  # the memory is still mapped
    assert isinstance(side.ranks[1], Rank)
