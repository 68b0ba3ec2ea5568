"""Engines with devices, and peers with shared memory."""

from collections.abc import Iterator

import pytest

from tests.engine.conftest import Attach, Leads
from tests.engine.mirrored.sides import MirroredSide
from tests.engine.support import Asked, Side, Workers


@pytest.fixture
def source(leads: Leads) -> Iterator[MirroredSide]:
    """Yields the engine of P, with a device."""
    side = MirroredSide(leads[0])
    yield side
    for way in ("out", "in"):
        side.device.let_go(way)
    side.close()


@pytest.fixture
def destination(leads: Leads) -> Iterator[MirroredSide]:
    """Yields the engine of D, with a device."""
    side = MirroredSide(leads[1])
    yield side
    for way in ("out", "in"):
        side.device.let_go(way)
    side.close()


@pytest.fixture
def reader(leads: Leads, attach: Attach) -> Side:
    """Attaches the engine of D, with shared memory."""
    return attach(leads[1])


@pytest.fixture
def giver(leads: Leads, attach: Attach) -> Side:
    """Attaches the engine of P, with shared memory."""
    return attach(leads[0])


@pytest.fixture(scope="module")
def device_workers() -> Iterator[list[Asked]]:
    made = Workers("tests.engine.mirrored.workers")
    yield [made.make() for _ in range(4)]
    made.close()
