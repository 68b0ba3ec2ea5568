"""A follower whose engines answer as the test says."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from kvgrpc.fleet.directory import Directory, HealthCheck
from kvgrpc.registry.base import Registry
from kvgrpc.registry.following import DirectoryFollower

WAIT_S = 30.0


@asynccontextmanager
async def following(
    registry: Registry,
    serves: Callable[[str], bool] = lambda _: True,
    is_there: Mapping[str, tuple[str, int]] | None = None,
) -> AsyncIterator[Directory]:
    """`is_there`: engine id and incarnation of who answers at each address; None: whoever is looked for."""

    async def ask(check: HealthCheck) -> bool:
        if is_there is not None and is_there.get(check.address) != (check.engine_id, check.incarnation):
            return False
        return serves(check.engine_id)

    follower = DirectoryFollower(Directory(), registry, ask)
    follower.start()
    try:
        yield follower.directory
    finally:
        await follower.stop()


async def until(holds: Callable[[], object]) -> None:
    """Waits for what holds at last."""
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110 - a directory tells nobody of its changes
            await asyncio.sleep(0.02)


def ids(directory: Directory) -> list[str]:
    return sorted(one.entry.engine_id for one in directory)
