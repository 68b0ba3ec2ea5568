"""The death of a lead that an engine launched: every earlier transfer fails once and comes back at rest, the pool keeps
its bytes, and the engine goes on with the next lead.

The lead is a process that is killed. Memory is shared (the lead moved the bytes) or private (a rank in the test's own
process moves them).
"""

import os
import signal
import time

import numpy as np
import pytest

from kvgrpc.core.values.layout import PoolKind
from kvgrpc.engine import BlocksReturned, Engine, Event, Failed, LeadDied, Received, content
from kvgrpc.errors import Reason, Unavailable
from tests.engine.lead_restart.sides import (
    CACHED,
    LAYOUT,
    PROMPT,
    SOURCE,
    TARGET,
    Side,
    Sides,
    check_ends,
    check_serves,
    kill,
    launched,
    move,
    poll_on,
    replaced,
    slow,
)
from tests.engine.support import EngineProcess, ended, new_key, readable, refused
from tests.service.conftest import TEST_S
from tests.service.engines import READY_S, wait_until

pytestmark = pytest.mark.timeout(TEST_S)


@pytest.mark.parametrize("mode", ["shm", slow("cma")])
def test_an_idle_engine_gets_a_new_lead_and_keeps_its_pool(sides: Sides, peer: Side, mode: str) -> None:
    side = sides(mode)
    check_serves(side, peer)
    cached = side.fill(CACHED, seed=1)
    engine, ticket = side.engine, side.engine.ticket
    before = engine.incarnation, engine.address, engine.engine_id
    assert replaced(side) == []
    assert engine.incarnation != before[0]
    assert (engine.address, engine.engine_id, engine.ticket) == (*before[1:], ticket)
    assert engine._lead is not None
    assert engine.lead_pid == engine._lead.pid
    assert np.array_equal(side.read(CACHED), cached)
    check_serves(side, peer)
    move(side, peer, CACHED, [60, 61, 62])
    assert np.array_equal(peer.read([60, 61, 62]), cached)


def test_while_a_lead_is_replaced_nothing_waits_and_calls_are_refused(sides: Sides) -> None:
    side = sides("shm")
    descriptor, before = side.engine.fileno(), side.engine.incarnation
    handover = side.engine.finished_blocks(SOURCE, content(PROMPT), transfer_key=new_key())
    push = side.engine.push(content(PROMPT), transfer_key=new_key())  # never sent to its lead
    kill(side)
    begun = time.monotonic()
    events, polls = list[Event](), list[float]()
    while side.engine.incarnation == before:
        at = time.monotonic()
        events += side.engine.poll()
        polls.append(time.monotonic() - at)
        if side.engine.incarnation == before:
            for call in (
                lambda: side.engine.finished_blocks(SOURCE, content(PROMPT), transfer_key=new_key()),
                lambda: side.engine.pull(handover.grant, content(PROMPT)),
                lambda: side.engine.reserve(TARGET, content(PROMPT), transfer_key=new_key()),
                lambda: side.engine.cancel(new_key()),
                lambda: push.finished(SOURCE),
                lambda: side.engine.allocate(1),
            ):
                with refused(Reason.ENGINE_LOST, Unavailable):
                    call()
            assert handover.take_back()
            handover.cancel()
            assert readable(READY_S, descriptor)
    assert len(polls) > 2
    assert max(polls) < (time.monotonic() - begun) / 2
    assert side.engine.fileno() == descriptor
    assert [type(event) for event in events if event.transfer is handover] == [Failed, BlocksReturned]
    assert not handover.take_back()
    push.finished(SOURCE, last=True)
    push.fail("nobody wants it")
    side.until(lambda _: push.over)


@pytest.mark.parametrize("speaker", ["worker", "scheduler"])
def test_reported_steps_hold_nothing_back_in_the_next_life(sides: Sides, peer: Side, speaker: str) -> None:
    side = sides("shm" if speaker == "worker" else "cma")
    who = side.rank if speaker == "worker" else side.engine
    who.step_done(49)
    before = side.engine.incarnation
    kill(side)
    side.engine.poll()
    who.step_done(50)
    side.until_it_lives_after(before)
    handover = side.engine.finished_blocks(SOURCE, content(PROMPT), transfer_key=new_key(), after_step=50)
    side.engine.flush()
    pull = peer.engine.pull(handover.grant, content(PROMPT))
    pull.start(TARGET)
    assert isinstance(peer.until(lambda _: pull.over)[-1], Received)
    side.until(lambda _: handover.over)


def test_a_lead_that_is_killed_while_it_starts_is_replaced_too(sides: Sides, peer: Side) -> None:
    side = sides("shm")
    lead = side.engine._lead
    assert lead is not None
    cached = side.fill(CACHED, seed=9)
    handover = side.engine.finished_blocks(SOURCE, content(PROMPT), transfer_key=new_key())
    before, first = side.engine.incarnation, lead.pid
    kill(side)
    events = side.until(lambda _: lead.pid != first)
    second = lead.pid
    kill(side)
    events += side.until_it_lives_after(before)
    check_ends(events, [handover])
    assert lead.pid not in (first, second)
    assert np.array_equal(side.read(CACHED), cached)
    check_serves(side, peer)


def test_a_stopped_lead_is_ended_and_replaced(sides: Sides, peer: Side) -> None:
    side = sides("shm")
    assert side.engine._lead is not None
    before, stopped = side.engine.incarnation, side.engine._lead.pid
    os.kill(stopped, signal.SIGSTOP)
    side.engine._lives._session.connection.shutdown()  # acts like a send that was not read in time
    side.until_it_lives_after(before)
    assert side.engine._lead.pid != stopped
    check_serves(side, peer)


def test_too_many_deaths_end_the_engine(peer: Side) -> None:
    side = launched("shm", relaunches=1)
    try:
        replaced(side)
        check_serves(side, peer)
        kill(side)
        for _ in range(2):
            with pytest.raises(LeadDied, match="1 leads were started anew within 60 s"):
                side.until(lambda _: False)
        with pytest.raises(LeadDied):
            side.engine.flush()
    finally:
        side.close()
    with pytest.raises(LeadDied):
        side.rank.step_done(1)


def test_a_lead_that_was_started_anew_is_not_left_behind_when_its_engine_is_killed() -> None:
    process = EngineProcess("launch")
    first = process.answer()["lead"]
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: process.ask(op="poll") != first, READY_S)
    pidfd = os.pidfd_open(process.ask(op="poll"))
    process.kill()
    process.close()
    assert ended(pidfd)
    os.close(pidfd)


def test_a_pool_that_the_server_manages_dies_with_its_lead() -> None:
    with Engine.launch(pool=LAYOUT, kind=PoolKind.SERVER_MANAGED, flags=["--data-paths", "shm"]) as engine:
        assert engine.ticket.comes_back_s == 0
        assert engine._lead is not None
        os.kill(engine._lead.pid, signal.SIGKILL)
        with pytest.raises(LeadDied, match="SIGKILL"):
            poll_on(engine, [])
