"""Health follows admission: which service is NOT_SERVING at which time."""

import asyncio
from typing import Any

import numpy as np
import pytest
from grpc_health.v1 import health_pb2

from kvgrpc.config import Config
from kvgrpc.core.events import LifeBegan
from kvgrpc.core.node import Node
from kvgrpc.core.tables.pins import PinKind
from kvgrpc.service.admission import WEDGED_S, admission
from kvgrpc.service.lead import Lead
from kvgrpc.service.rpc import health
from kvgrpc.service.rpc.health import Health
from kvgrpc.service.rpc.server import SERVICES
from kvgrpc.service.runner import Runner
from kvgrpc.v1 import handshake_pb2
from tests.core.nodes import describe, full

NEW_WORK = "kvgrpc.v1.HandoffService"


class Movers:
    """Movers that have made no progress for `age_s` seconds."""

    age_s = 0.0

    def progress_age_s(self) -> float:
        return self.age_s


async def read_nothing(*_: object) -> list[bytes]:
    return []


@pytest.fixture
def movers() -> Movers:
    return Movers()


@pytest.fixture
async def lead(movers: Movers) -> Lead:
    """Returns a lead of an engine with eight blocks."""
    node = Node()
    node.handle(LifeBegan(1, b"secret", describe(pool=full(8))), 1.0)
    return Lead(Config(), Runner(node), list, read_nothing, movers.progress_age_s, "0")


@pytest.fixture
async def found(lead: Lead) -> Health:
    return Health(lead, SERVICES, None)


async def serving(found: Health) -> dict[str, bool]:
    """Looks once, then returns each service's health. "" is the whole server."""
    await found.look()
    return {name: await _is_serving(found, name) for name in (*SERVICES, "")}


async def _is_serving(found: Health, name: str) -> bool:
    context: Any = None
    reply = await found.servicer.Check(health_pb2.HealthCheckRequest(service=name), context)
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def all_but(*names: str) -> dict[str, bool]:
    return {name: name not in names for name in (*SERVICES, "")}


async def test_everything_serves_while_admission_is_open(found: Health) -> None:
    assert await serving(found) == all_but()


async def test_nothing_serves_without_an_engine(found: Health, lead: Lead) -> None:
    lead.runner.node.handle(LifeBegan(2, b"", None), 2.0)
    assert not any((await serving(found)).values())


async def test_a_draining_server_starts_nothing_new_and_ends_the_rest(found: Health, lead: Lead) -> None:
    lead.runner.node.state.life.draining = True
    assert await serving(found) == all_but(NEW_WORK)
    await found.stop()
    assert not any([await _is_serving(found, name) for name in (*SERVICES, "")])


async def test_too_much_in_quarantine_stops_new_work_only(found: Health, lead: Lead) -> None:
    pins = lead.runner.node.state.pool.pins
    pins.add("t-1", PinKind.QUARANTINE, (np.arange(4),), 1.0)
    assert await serving(found) == all_but()
    pins.add("t-2", PinKind.QUARANTINE, (np.arange(4, 5),), 1.0)
    state, why = admission(lead)
    assert state == handshake_pb2.ADMISSION_QUARANTINE_FULL
    assert "5 of 8 blocks" in why
    assert await serving(found) == all_but(NEW_WORK)
    pins.drop("t-2", PinKind.QUARANTINE)
    assert await serving(found) == all_but()


async def test_nothing_serves_while_a_data_path_is_wedged(found: Health, lead: Lead, movers: Movers) -> None:
    movers.age_s = WEDGED_S + 1
    assert admission(lead)[0] == handshake_pb2.ADMISSION_WEDGED
    assert not any((await serving(found)).values())
    movers.age_s = 0.0
    assert await serving(found) == all_but()


async def test_a_server_that_drains_over_a_wedged_data_path_says_wedged(
    found: Health, lead: Lead, movers: Movers
) -> None:
    lead.runner.node.state.life.draining = True
    movers.age_s = WEDGED_S + 1
    assert admission(lead)[0] == handshake_pb2.ADMISSION_WEDGED
    assert not any((await serving(found)).values())


async def test_a_wedged_data_path_is_noticed(found: Health, movers: Movers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "LOOK_S", 0.001)
    await found.look()
    found.start()
    for age_s, expected in ((0.0, True), (WEDGED_S + 1, False), (0.0, True)):
        movers.age_s = age_s
        async with asyncio.timeout(10):
            while await _is_serving(found, NEW_WORK) is not expected:  # noqa: ASYNC110 - health has no event
                await asyncio.sleep(0)
    await found.stop()
