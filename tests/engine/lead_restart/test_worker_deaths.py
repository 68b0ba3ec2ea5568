"""A worker's death ends its engine, whether or not the lead dies too."""

import os
import signal

import pytest

from kvgrpc.engine import BlocksReturned, Engine, Event, LeadDied, content
from kvgrpc.engine.session import lead_restart
from tests.engine.lead_restart.sides import PROMPT, launched, poll_on
from tests.engine.made import layout
from tests.engine.support import Workers, new_key
from tests.service.conftest import TEST_S

pytestmark = pytest.mark.timeout(TEST_S)


def test_a_worker_that_dies_ends_the_engine_though_it_has_a_lead_of_its_own() -> None:
    side = launched("shm")
    assert side.engine._lead is not None
    first = side.engine._lead.pid
    side.rank.close()
    for _ in range(2):
        with pytest.raises(LeadDied, match="the worker of rank 0 is gone"):
            poll_on(side.engine, [])
    assert side.engine._lead.pid == first
    side.close()


def test_a_worker_that_dies_with_its_lead_ends_the_engine(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lead_restart, "WORKERS_S", 0.5)
    one, two = workers.make(), workers.make()
    with Engine.launch(pool=layout(), private_memory=True, world_size=2, flags=["--data-paths", "cma"]) as engine:
        for rank, worker in enumerate((one, two)):
            ticket = engine.ticket
            given = {"socket_path": ticket.socket_path, "secret": ticket.secret.hex(), "data_paths": ["cma"]}
            sizes = {"memory_bytes": ticket.memory_bytes, "comes_back_s": ticket.comes_back_s}
            worker.send(op="attach", rank=rank, **given, **sizes)
            assert worker.answer() == "attached"
        assert engine._lead is not None
        handover = engine.finished_blocks([1, 2], content(PROMPT[:32]), transfer_key=new_key())
        engine.flush()
        two.kill()
        os.kill(engine._lead.pid, signal.SIGKILL)
        events: list[Event] = []
        with pytest.raises(LeadDied):
            poll_on(engine, events)
        assert not any(isinstance(event, BlocksReturned) for event in events)
        assert not handover.over
