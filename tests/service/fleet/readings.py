"""What tests of a reader of the registry use."""

import asyncio
from collections.abc import Callable

import grpc.aio


def connect(address: str, _: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address)


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not met():  # noqa: ASYNC110 - a reader tells nobody
            await asyncio.sleep(0.02)
