"""Fixtures for the client tests: a fake server and a client connected to it."""

from collections.abc import AsyncIterator

import pytest

from kvgrpc.client import Client, connect
from tests.client.fake import FakeServer


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def client(server: FakeServer) -> AsyncIterator[Client]:
    async with connect(server.address) as made:
        yield made
