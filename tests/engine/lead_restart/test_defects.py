"""A defect of its lead affects an engine like the lead's death: all transfers fail, blocks come back at rest, and a
lead that the engine launched is replaced.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvgrpc.engine import BlocksReturned, Engine, Event, Failed, LeadDied, PullOpened, content
from kvgrpc.engine.transfers.handles import Handle
from kvgrpc.errors import PreconditionFailed, Reason
from kvgrpc.v1 import admin_pb2, handshake_pb2
from tests.engine.conftest import SETTINGS, Leads
from tests.engine.lead_restart.sides import (
    CACHED,
    LAYOUT,
    PROMPT,
    SOURCE,
    TARGET,
    Side,
    check_serves,
    launched,
    shared,
    slow,
)
from tests.engine.support import new_key, refused
from tests.service.api import Api
from tests.service.conftest import TEST_S
from tests.service.defective import MESSAGE, DefectiveProcess, python_path
from tests.service.engines import HOME

pytestmark = pytest.mark.timeout(TEST_S)


@pytest.fixture
def peer(leads: Leads) -> Iterator[Side]:
    """Yields an engine whose lead has no defect."""
    side = shared(Engine.attach(leads[0].socket_path, pool=LAYOUT))
    yield side
    side.close()


def ends(events: list[Event], handle: Handle) -> list[type[Event]]:
    return [type(event) for event in events if event.transfer is handle and isinstance(event, Failed | BlocksReturned)]


@pytest.mark.parametrize("mode", ["shm", "cma", slow("nixl")])
def test_an_engine_survives_a_defect(mode: str, peer: Side, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    side = launched(mode)
    try:
        check_serves(side, peer)
        cached = side.fill(CACHED, seed=1)
        before, pid = side.engine.incarnation, side.engine.lead_pid
        handover = side.engine.finished_blocks(SOURCE, content(PROMPT), transfer_key=new_key())
        offer = peer.engine.finished_blocks(SOURCE, content(PROMPT), transfer_key=new_key())
        peer.engine.flush()
        pull = side.engine.pull(offer.grant, content(PROMPT))
        side.until(lambda events: any(isinstance(event, PullOpened) for event in events))
        handover.cancel(MESSAGE)
        events = side.until_it_lives_after(before)
        assert ends(events, handover) == ends(events, pull) == [Failed, BlocksReturned]
        assert handover.over
        assert pull.over
        with refused(Reason.TRANSFER_ENDED, PreconditionFailed):
            pull.start(TARGET)
        assert side.engine.lead_pid != pid, "the end of its process proves its memory to be at rest"
        assert np.array_equal(side.read(CACHED), cached)
        late = peer.engine.pull(handover.grant, content(PROMPT))
        failed = next(
            event for event in peer.until(lambda _: late.over) if isinstance(event, Failed) and event.transfer is late
        )
        assert failed.reason is Reason.INCARNATION_CHANGED
        offer.cancel()
        check_serves(side, peer)
    finally:
        side.close()


def test_at_a_lead_that_it_did_not_launch_an_engine_is_told_that_it_died(tmp_path: Path) -> None:
    path = str(tmp_path / "session.sock")
    flags = ("--listen", f"{HOME}:0", "--no-pool", "--drain-s", "0", "--session-socket", path)
    process = DefectiveProcess(tmp_path / "lead", *flags, settings=SETTINGS)
    api = Api(process.wait_ready()["address"])
    try:
        side = shared(Engine.attach(path, pool=LAYOUT))
        handover = side.engine.finished_blocks(SOURCE, content(PROMPT), transfer_key=new_key())
        handover.cancel(MESSAGE)
        with pytest.raises(LeadDied):
            side.until(lambda _: handover.over)
        side.close()
        found = api.admin.GetStatus(admin_pb2.GetStatusRequest())
        assert (found.admission, found.counts.defect_count) == (handshake_pb2.ADMISSION_NO_ENGINE, 1)
        assert "defect" in found.admission_reason
        again = shared(Engine.attach(path, pool=LAYOUT))
        again.engine.finished_blocks(SOURCE, content(PROMPT), transfer_key=new_key())
        again.engine.poll()
        again.close()
    finally:
        api.close()
        process.end()
