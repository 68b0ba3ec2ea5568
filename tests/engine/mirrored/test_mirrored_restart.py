"""The death of the lead of an engine with a device: the next lead has a new mirror, once the old one is at rest."""

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvgrpc.engine import Engine, LeadDied, Rank, content
from kvgrpc.errors import Exhausted, Reason
from tests.engine.lead_restart.sides import check_ends, kill
from tests.engine.made import layout
from tests.engine.mirrored.fake_device import FakeDevice
from tests.engine.mirrored.sides import MirroredSide, check_not_at_rest, mirrors
from tests.engine.support import Side, kinds, received, tokens
from tests.service.engines import READY_S, wait_until

PROMPT = tokens(40)
SOURCE, TARGET = [1, 2, 9], [30, 31, 5]


class Launched(MirroredSide):
    """An engine with a device and a lead of its own."""

    def __init__(self) -> None:
        self.device = FakeDevice()
        self.engine = Engine.launch(pool=layout(), mirrored=True)
        self.ranks = [Rank(self.engine.ticket, 0, device=self.device)]


@pytest.fixture
def launched() -> Iterator[Launched]:
    side = Launched()
    yield side
    for way in ("out", "in"):
        side.device.let_go(way)
    side.close()


def pulled(source: MirroredSide, reader: Side, seed: int) -> None:
    """Checks that new bytes of the device arrive at a reader."""
    made = source.fill(SOURCE, seed)
    handover = source.hand_over(SOURCE, PROMPT)
    pull = reader.engine.pull(handover.grant, content(PROMPT))
    pull.start(TARGET)
    received(reader.finish(pull))
    source.finish(handover)
    assert np.array_equal(reader.read(TARGET), made)


def lives_again(launched: Launched, before: int) -> list[Any]:
    """Returns the engine's events until it has another incarnation."""
    events = []

    def lives() -> bool:
        events.extend(launched.engine.poll(0.05))
        return launched.engine.incarnation != before

    wait_until(lives, READY_S)
    return events


@pytest.mark.timeout(120)
def test_an_engine_goes_on_with_a_new_mirror(launched: Launched, reader: Side) -> None:
    pulled(launched, reader, seed=1)
    launched.device.hold("out")
    handover = launched.hand_over(SOURCE, PROMPT)
    launched.device.wait_started("out")
    before = launched.engine.incarnation
    kill(launched)  # type: ignore[arg-type]
    launched.device.let_go("out")
    events = lives_again(launched, before)
    check_ends(events, [handover])
    assert kinds(events) == ["Failed", "BlocksReturned"]
    pulled(launched, reader, seed=2)
    assert launched.device.opened == 2


@pytest.mark.timeout(120)
def test_an_engine_whose_copies_do_not_end_does_not_come_back(launched: Launched) -> None:
    launched.device.hold("out")
    launched.hand_over(SOURCE, PROMPT)
    launched.device.wait_started("out")
    held = mirrors().keys()
    kill(launched)  # type: ignore[arg-type]
    with pytest.raises(LeadDied):
        wait_until(lambda: launched.engine.poll(0.05) is None, READY_S)
    assert launched.device.opened == 1
    assert not mirrors().keys() - held, "what is not at rest stays, and there is no other one"
    check_not_at_rest(launched)


@pytest.mark.timeout(120)
def test_a_host_that_still_holds_the_old_mirror_is_waited_for(launched: Launched, reader: Side) -> None:
    launched.device.refusals = [Exhausted(Reason.POOL_EXHAUSTED, "peers still map the old one")] * 2
    before = launched.engine.incarnation
    kill(launched)  # type: ignore[arg-type]
    lives_again(launched, before)
    pulled(launched, reader, seed=3)
    assert (launched.device.refusals, launched.device.opened) == ([], 2)


@pytest.mark.timeout(120)
def test_a_device_that_breaks_on_the_way_back_ends_the_life_of_its_rank(
    launched: Launched, caplog: pytest.LogCaptureFixture
) -> None:
    launched.device.refusals = [RuntimeError("the device fell off the bus")]
    kill(launched)  # type: ignore[arg-type]

    def told() -> bool:
        launched.engine.poll(0.05)
        try:
            launched.ranks[0].step_done(1)
        except LeadDied:
            return True
        return False

    with caplog.at_level(logging.ERROR):
        wait_until(told, READY_S)
    assert "cannot come back" in caplog.text
    assert "fell off the bus" in caplog.text
    launched.device.open(np.zeros(launched.device.nbytes, dtype=np.uint8))  # the device has no mirror open
