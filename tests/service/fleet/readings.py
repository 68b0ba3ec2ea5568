"""What tests of a reader of the registry use."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from kvgrpc.config_fleet import FleetConfig
from kvgrpc.core.values.content import chain
from kvgrpc.fleet.directory import EngineState
from kvgrpc.fleet.pairing import PairRequest
from kvgrpc.service.fleet.reader import FleetReader, FleetReading
from tests.service.engines import Engine
from tests.service.fleet.conftest import EnginesFile
from tests.service.values import prompt

TOKENS = 256
UNITS = TOKENS // 16


def digests_of(seed: int) -> list[bytes]:
    """Returns the digests of the whole units of a prompt, as a choice looks them up."""
    return [chain(prompt(TOKENS, seed)).digests[at : at + 32] for at in range(0, UNITS * 32, 32)]


def offer(engine: Engine, seed: int, **fields: Any) -> str:
    """Hands a prompt over so that it can be found. Returns the lease id."""
    return engine.hand_over(prompt(TOKENS, seed), findable=True, **fields).grant.lease_id


def connect(address: str, _: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address)


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not met():  # noqa: ASYNC110 - a reader tells nobody
            await asyncio.sleep(0.02)


def state_of(reading: FleetReading, engine_id: str) -> EngineState | None:
    found = reading.directory.find(engine_id)
    return None if found is None else reading.directory.state(found, asyncio.get_running_loop().time())


@asynccontextmanager
async def read(
    folder: Path, addresses: dict[str, str], **settings: Any
) -> AsyncIterator[tuple[FleetReader, FleetReading]]:
    """Reads a fleet of leads, which are all healthy at first."""
    path = EnginesFile(folder / "engines.json")
    path.write([{"engine_id": of, "addresses": [at]} for of, at in addresses.items()])
    fleet = FleetConfig(registry=path.environment["KVGRPC_FLEET_REGISTRY"], check_every_s=0.5, **settings)
    reader = FleetReader(fleet, connect, lambda _: True, always=True)
    reading = await reader.reading()
    try:
        await until(lambda: all(state_of(reading, of) is EngineState.HEALTHY for of in addresses))
        yield reader, reading
    finally:
        await reader.stop()


async def ask(reader: FleetReader, *seeds: int, tenant: str = "") -> None:
    """Asks for a pair with the chain of each prompt."""
    for seed in seeds or (99,):
        await reader.pick_pair(PairRequest(chain=digests_of(seed), tenant=tenant))
