"""Engines whose worker processes bring their own memory: torch tensors, two ranks on each side.

The leads move no bytes: the destination's workers read from the source's workers, rank by rank.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvgrpc.engine import content
from kvgrpc.errors import Reason
from kvgrpc.v1 import common_pb2
from tests.engine.conftest import SETTINGS, Leads
from tests.engine.private_side import PrivateSide, Teams
from tests.engine.support import Lead, Workers, failure, lead_died, received, tokens
from tests.service.engines import wait_until
from tests.service.values import seconds

Pair = tuple[PrivateSide, PrivateSide]

PROMPT = tokens(40)
SOURCE, TARGET = [1, 2, 9], [30, 31, 5]
DATA_PATHS = ("cma", "nixl")


@pytest.fixture(scope="module")
def nixl_lead(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lead]:
    """Yields a lead that allows nixl only."""
    lead = Lead(tmp_path_factory.mktemp("lead"), "N", "--data-paths", "nixl", settings=SETTINGS)
    yield lead.wait_ready()
    lead.close()


@pytest.fixture(params=DATA_PATHS)
def pair(leads: Leads, teams: Teams, request: pytest.FixtureRequest) -> Iterator[Pair]:
    with ExitStack() as stack:
        sides = []
        for lead, own in zip(leads, teams, strict=True):
            sides.append(PrivateSide(lead, own, request.param))
            stack.callback(sides[-1].close)
        yield sides[0], sides[1]


def test_each_rank_gets_the_bytes_of_its_own_peer(pair: Pair, request: pytest.FixtureRequest) -> None:
    source, destination = pair
    for seed in (100, 200):  # the second transfer reuses the first one's connection
        expected = source.fill_all(SOURCE, seed)
        untouched = destination.read_all([29, 32, 4])
        handover = source.hand_over(SOURCE, PROMPT)
        pull = destination.engine.pull(handover.grant, content(PROMPT))
        pull.start(TARGET)
        received(destination.finish(pull))
        source.finish(handover)
        assert destination.read_all(TARGET) == expected
        assert len(set(expected)) == 2
        assert destination.read_all([29, 32, 4]) == untouched
        moved = destination.lead.transfer(pull.transfer_id)
        path = common_pb2.DataPath.Value(f"DATA_PATH_{request.node.callspec.params['pair'].upper()}")
        assert [(row.rank, row.data_path) for row in moved.paths] == [(0, path), (1, path)]
        assert moved.total_bytes == 2 * 3 * 2 * 1024


def test_a_workers_steps_hold_its_engines_blocks_back(pair: Pair) -> None:
    source, destination = pair
    handover = source.hand_over(SOURCE, PROMPT, after_step=4)
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    pull.start(TARGET)
    destination.lead.wait_for(destination.known(pull), "access")
    expected = source.fill_all(SOURCE, 300)
    for worker in source.workers:
        assert worker.ask(op="step_done", step=4) == "reported"
    received(destination.finish(pull))
    assert destination.read_all(TARGET) == expected


def test_a_worker_stopped_while_bytes_move_is_seen_in_the_status(pair: Pair) -> None:
    source, destination = pair
    assert seconds(destination.lead.status().progress_age) == 0.0
    handover = source.hand_over(SOURCE, PROMPT)
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    destination.poll_until(lambda events: len(events) == 1)  # the pull is open and waits for blocks
    stopped = destination.workers[1].pid
    os.kill(stopped, signal.SIGSTOP)
    stat = Path(f"/proc/{stopped}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    try:
        pull.start(TARGET)
        destination.round_trip()
        first = seconds(destination.lead.status().progress_age)
        assert seconds(destination.lead.status().progress_age) > first > 0.0
    finally:
        os.kill(stopped, signal.SIGCONT)
    received(destination.finish(pull))
    assert seconds(destination.lead.status().progress_age) == 0.0


@pytest.mark.parametrize("restricted", ["source", "destination"])
def test_workers_use_only_allowed_data_paths(leads: Leads, nixl_lead: Lead, teams: Teams, restricted: str) -> None:
    """All workers could use cma, which is the better path."""
    ends = (nixl_lead, leads[1]) if restricted == "source" else (leads[0], nixl_lead)
    with ExitStack() as stack:
        sides = []
        for lead, own in zip(ends, teams, strict=True):
            sides.append(PrivateSide(lead, own, "cma", "nixl"))
            stack.callback(sides[-1].close)
        source, destination = sides
        expected = source.fill_all(SOURCE, 400)
        handover = source.hand_over(SOURCE, PROMPT)
        pull = destination.engine.pull(handover.grant, content(PROMPT))
        pull.start(TARGET)
        received(destination.finish(pull))
        assert destination.read_all(TARGET) == expected
        moved = destination.lead.transfer(pull.transfer_id)
        assert [row.data_path for row in moved.paths] == [common_pb2.DATA_PATH_NIXL] * 2
        for side in sides:
            side.engine.close()
    nixl_lead.wait_no_engine()


def test_an_engine_that_ends_leaves_its_workers_a_clear_word(pair: Pair) -> None:
    source, _ = pair
    source.engine.close()
    source.lead.wait_no_engine()
    for worker in source.workers:
        assert worker.ask(op="step_done", step=1) == "LeadDied"


@pytest.mark.parametrize("data_path", DATA_PATHS)
def test_a_killed_worker_ends_its_engine(leads: Leads, workers: Workers, teams: Teams, data_path: str) -> None:
    with ExitStack() as stack:
        source = PrivateSide(leads[0], teams[0], data_path)
        stack.callback(source.close)
        destination = PrivateSide(leads[1], teams[1], data_path)
        stack.callback(destination.close)
        before = source.lead.status().header.incarnation
        handover = source.hand_over(SOURCE, PROMPT, ttl_s=300.0)
        pull = destination.engine.pull(handover.grant, content(PROMPT))
        destination.poll_until(lambda events: len(events) == 1)  # the pull is open and waits for blocks
        teams[0][1].kill()
        teams[0][1] = workers.make()
        lead_died(source)
        source.lead.wait_no_engine()
        assert source.lead.status().header.incarnation != before
        assert not source.lead.leases()
        pull.start(TARGET)
        # Rank 0 lives and its bytes are readable, but no lead vouches for them.
        assert failure(destination.finish(pull)).reason in (
            Reason.DATA_PATH_FAILED,
            Reason.INCARNATION_CHANGED,
            Reason.PEER_LOST,
        )
        assert destination.engine.poll() == []
