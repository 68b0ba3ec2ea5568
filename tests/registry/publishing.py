"""A publication that runs as long as the test says."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvgrpc.fleet.entry import EngineEntry
from kvgrpc.registry.etcd import EtcdPublication, EtcdSettings
from tests.registry.following import until


@asynccontextmanager
async def published(to: EtcdSettings, one: EngineEntry) -> AsyncIterator[EtcdPublication]:
    publication = EtcdPublication(to, one)
    running = asyncio.create_task(publication.run())
    try:
        await until(publication.published.is_set)
        yield publication
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await publication.withdraw()
