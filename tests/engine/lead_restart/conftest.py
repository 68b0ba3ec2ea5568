"""Engines with leads of their own, and peers whose leads stay alive."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvgrpc.engine import Engine
from tests.engine.conftest import SETTINGS, Leads
from tests.engine.lead_restart.sides import LAYOUT, SLOW, Side, Sides, launched, shared
from tests.engine.support import Lead


@pytest.fixture(scope="module")
def peer(leads: Leads) -> Iterator[Side]:
    """Yields an engine that stays alive. Its lead allows all data paths."""
    side = shared(Engine.attach(leads[0].socket_path, pool=LAYOUT))
    yield side
    side.close()


@pytest.fixture(scope="module")
def slow_peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    """Yields an engine that reads so slowly that its reads are still in flight when a lead is killed."""
    lead = Lead(tmp_path_factory.mktemp("slow"), "S", *SLOW, settings=SETTINGS).wait_ready()
    side = shared(Engine.attach(lead.socket_path, pool=LAYOUT))
    yield side
    side.close()
    lead.close()


@pytest.fixture(scope="module")
def sides() -> Iterator[Sides]:
    """Yields a maker of engines with leads of their own. Each is launched at first use, and outlives every kill."""
    made: dict[tuple[str, ...], Side] = {}
    with ExitStack() as stack:

        def get(*arguments: str) -> Side:
            if arguments not in made:
                made[arguments] = launched(*arguments)
                stack.callback(made[arguments].close)
            return made[arguments]

        yield get
