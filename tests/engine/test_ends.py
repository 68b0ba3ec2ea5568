"""Engines and leads that are killed, and how the other processes react."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvgrpc.core.values.grants import from_json
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.engine import Engine, LeadDied, Rank, content, engine as engine_module
from kvgrpc.engine.session import connection, session as session_module
from kvgrpc.engine.session.launch import LeadProcess
from kvgrpc.errors import DeadlineExceeded, InvalidRequest, PreconditionFailed, Reason, Unavailable
from tests.engine.conftest import SETTINGS, Attach, Leads
from tests.engine.made import BLOCKS, layout
from tests.engine.support import WAIT_S, EngineProcess, Lead, ended, failure, new_key, refused, tokens
from tests.service.engines import wait_until

PROMPT = tokens(40)
AT_ONCE_S = 5.0
"""Time limit in seconds: far above the milliseconds of an idle machine, below the grace and every TTL here."""


@pytest.fixture
def victim(leads: Leads) -> Iterator[EngineProcess]:
    """Yields an engine in a process of its own, on the first lead."""
    process = EngineProcess(leads[0].socket_path)
    process.answer()
    yield process
    process.close()


def _dies_at_once(lead: Lead, incarnation: int) -> None:
    wait_until(lambda: not lead.has_engine(), AT_ONCE_S)
    assert lead.status().header.incarnation != incarnation
    assert not lead.leases()
    assert lead.process.popen.poll() is None


def test_a_killed_engine_ends_at_once_and_another_attaches(leads: Leads, attach: Attach, victim: EngineProcess) -> None:
    lead, destination = leads[0], attach(leads[1])
    incarnation = lead.status().header.incarnation
    grants = [from_json(victim.ask(op="hand_over", blocks=[i, i + 1, i + 2], tokens=PROMPT)) for i in (0, 3)]
    assert len(lead.leases()) == 2
    pull = destination.engine.pull(grants[0], content(PROMPT))
    destination.poll_until(lambda events: len(events) == 1)  # the pull is open and waits for blocks
    before = destination.view().copy()
    # A forked child outlives the engine, and must not keep its session alive.
    child = victim.ask(op="fork")
    try:
        victim.kill()
        _dies_at_once(lead, incarnation)
    finally:
        os.kill(child, signal.SIGKILL)
    # The bytes are still readable, but the source's lead no longer vouches for them.
    pull.start([10, 11, 12])
    started = time.monotonic()
    assert failure(destination.finish(pull)).reason in (Reason.INCARNATION_CHANGED, Reason.PEER_LOST)
    assert time.monotonic() - started < AT_ONCE_S
    next_ = attach(lead)
    assert next_.engine.incarnation != incarnation
    late = destination.engine.pull(grants[1], content(PROMPT))
    late.start([20, 21, 22])
    assert failure(destination.finish(late)).reason is Reason.INCARNATION_CHANGED
    assert not lead.leases()
    assert np.array_equal(destination.view()[:, 20:23], before[:, 20:23])


def test_a_killed_destination_returns_blocks_of_its_source(leads: Leads, attach: Attach, victim: EngineProcess) -> None:
    source = attach(leads[1])
    handover = source.hand_over([1, 2, 3], PROMPT, ttl_s=300.0)
    victim.ask(op="pull", grant=handover.kv_transfer_params, tokens=PROMPT, blocks=[])
    incarnation = leads[0].status().header.incarnation
    victim.kill()
    _dies_at_once(leads[0], incarnation)
    started = time.monotonic()
    assert failure(source.finish(handover)).reason is Reason.CANCELLED
    assert time.monotonic() - started < AT_ONCE_S


def test_an_engine_that_is_stopped_keeps_what_it_has(leads: Leads, victim: EngineProcess) -> None:
    """Its leases run by the lead's clock, and serving them needs nothing of the engine."""
    victim.ask(op="hand_over", blocks=[1, 2, 3], tokens=PROMPT)
    os.kill(victim.pid, signal.SIGSTOP)
    try:
        assert len(leads[0].leases()) == 1
        assert leads[0].has_engine()
    finally:
        os.kill(victim.pid, signal.SIGCONT)


def test_a_stopped_lead_does_not_delay_an_engine(leads: Leads, attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    side = attach(leads[0], kind=PoolKind.SERVER_MANAGED)
    monkeypatch.setattr(session_module, "CALL_TIMEOUT_S", 0.1)
    with leads[0].process.stopped():
        started = time.monotonic()
        side.hand_over([1], tokens(16))
        assert side.engine.poll() == []
        assert time.monotonic() - started < AT_ONCE_S
        with refused(Reason.DEADLINE, DeadlineExceeded):
            side.engine.allocate(BLOCKS)
    monkeypatch.undo()
    # A session answers in the order of its calls. With this answer the late allocation has come, and was given back.
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        side.engine.allocate(0)
    assert len(side.engine.allocate(BLOCKS)) == BLOCKS


def test_a_lead_that_reads_no_more_is_given_up(leads: Leads, attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SEND_TIMEOUT_S", 0.2)
    side = attach(leads[0])
    with leads[0].process.stopped(), pytest.raises(LeadDied):
        side.hand_over([1], tokens(1 << 20))


def test_attaching_to_a_stopped_lead_ends(leads: Leads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ATTACH_TIMEOUT_S", 0.1)
    with leads[0].process.stopped(), refused(Reason.DEADLINE, Unavailable):
        Engine.attach(leads[0].socket_path, pool=layout())


def test_an_engine_and_its_workers_notice_a_killed_lead(tmp_path: Path, leads: Leads, attach: Attach) -> None:
    own, destination = Lead(tmp_path, "own", settings=SETTINGS).wait_ready(), attach(leads[1])
    with ExitStack() as stack:
        stack.callback(own.close)
        engine = stack.enter_context(Engine.attach(own.socket_path, pool=layout(), private_memory=True))
        memory = np.zeros(engine.pool.total_bytes, dtype=np.uint8)
        rank = stack.enter_context(Rank(engine.ticket, 0, [memory], data_paths=("cma",)))
        handover = engine.finished_blocks([1, 2, 3], content(PROMPT), transfer_key=new_key())
        engine.flush()
        pull = destination.engine.pull(handover.grant, content(PROMPT))
        destination.poll_until(lambda events: len(events) == 1)  # the pull is open and waits for blocks
        own.process.kill()
        started = time.monotonic()
        with pytest.raises(LeadDied) as died:
            _poll_on(engine)
        assert died.value.reason is Reason.PEER_LOST
        # The worker's mover ends by itself, because there is nothing left to move.
        assert rank._thread is not None
        rank._thread.join(WAIT_S)
        assert not rank._thread.is_alive()
        with pytest.raises(LeadDied):
            rank.step_done(1)
        with pytest.raises(LeadDied):  # every further call repeats the error
            engine.allocate(1)
        assert time.monotonic() - started < AT_ONCE_S
        pull.start([1, 2, 3])
        failure(destination.finish(pull))


def _poll_on(engine: Engine) -> None:
    while True:
        assert engine.poll(WAIT_S) == []


def test_a_launched_lead_ends_with_an_engine_that_is_killed() -> None:
    process = EngineProcess("launch")
    pidfd = os.pidfd_open(process.answer()["lead"])
    process.kill()
    process.close()
    assert ended(pidfd)
    os.close(pidfd)


def test_a_launched_lead_has_ended_in_order_when_its_engine_is_closed() -> None:
    with Engine.launch(pool=layout(), flags=["--data-paths", "shm"]) as engine:
        lead = engine._lead
        assert lead is not None
        assert os.getsid(lead.pid) != os.getsid(0)  # Ctrl-C must reach the engine only
        rank = Rank(engine.ticket)
    engine.close()
    rank.close()
    assert lead._process.poll() == 0


def test_an_engine_says_how_its_own_lead_ended() -> None:
    with Engine.launch(pool=layout(), flags=["--data-paths", "shm"], relaunches=0) as engine:
        assert engine._lead is not None
        os.kill(engine._lead.pid, signal.SIGKILL)
        with pytest.raises(LeadDied, match="SIGKILL"):
            _poll_on(engine)


def test_a_lead_that_does_not_start_says_why() -> None:
    with pytest.raises(LeadDied, match=r"exit code 2.*data_paths"):
        Engine.launch(pool=layout(), flags=["--data-paths", "carrier-pigeon"])


def test_a_lead_may_print_as_much_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_LOG_LEVEL", "debug")  # prints some hundred kilobytes to the standard output
    with Engine.launch(pool=layout(), flags=["--data-paths", "nixl"]) as engine:
        rank = Rank(engine.ticket)
        with pytest.raises(PreconditionFailed):  # the refusal shows that the lead answers
            engine.free([1])
        rank.close()


def test_a_launched_lead_is_not_left_behind_when_the_attach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Watched(LeadProcess):
        def __init__(self, listen: str, flags: Sequence[str]) -> None:
            super().__init__(listen, flags)
            started.append(os.pidfd_open(self.pid))

    monkeypatch.setattr(engine_module, "LeadProcess", Watched)
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        Engine.launch(world_size=5000, pool=layout(), flags=["--data-paths", "shm"])
    assert ended(started[0])
    os.close(started[0])


def test_an_engine_that_is_abandoned_takes_its_lead_along() -> None:
    engine = Engine.launch(pool=layout(), flags=["--data-paths", "shm"])
    pid = engine.lead_pid
    engine.finished_blocks([1, 2, 3], content(PROMPT), transfer_key=new_key())
    engine.flush()
    engine.abandon()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(LeadDied):
        engine.poll()
