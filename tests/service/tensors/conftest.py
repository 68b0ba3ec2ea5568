"""Two stores that every test of this folder may use, and a maker of others. Nothing is left in the shared ones."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest

from kvgrpc.service.tensors.staging_store import StagingStore
from tests.service.conftest import SHARED
from tests.service.engines import ServeProcess, meet, wait_until
from tests.service.tensors.leads import served
from tests.service.tensors.pairs import PAGES, Pair
from tests.service.tensors.stores import TENSORS, Store
from tests.service.values import new_key

Begin = Callable[..., list[Store]]


def started(folder: Path, names: tuple[str, ...], settings: tuple[str, ...], *flags: str) -> list[Store]:
    processes = [
        ServeProcess(folder / name, *SHARED, *flags, settings=text) for name, text in zip(names, settings, strict=True)
    ]
    return [Store(process) for process in processes]


@pytest.fixture(scope="session")
def store_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, Store]]:
    p, d = started(tmp_path_factory.mktemp("stores"), ("p", "d"), (TENSORS, TENSORS))
    meet(p, d)
    yield p, d
    p.close()
    d.close()


@pytest.fixture
def stores(store_pair: tuple[Store, Store]) -> Iterator[tuple[Store, Store]]:
    """Yields a source and a consumer."""
    yield store_pair
    for store in store_pair:
        # Released leases end when their readers have closed.
        wait_until(lambda store=store: store.used() == 0, 20.0, lambda store=store: (store.listed(), store.status()))  # type: ignore[misc]
        assert (store.status().tensor_count, store.status().offered_count, store.status().waiting_count) == (0, 0, 0)
        store._allocated.clear()


@pytest.fixture
def key() -> bytes:
    return new_key()


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Starts a test's own stores, one for each settings text."""
    numbers = count()
    with ExitStack() as stack:

        def make(*settings: str, flags: tuple[str, ...] = ()) -> list[Store]:
            names = tuple(f"store-{next(numbers)}" for _ in settings)
            made = started(tmp_path, names, settings, *flags)
            for store in made:
                stack.callback(store.close)
            return made

        yield make


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """Yields a source and a consumer in this process."""
    async with served(pages=PAGES) as p, served(pages=PAGES) as d:
        yield Pair(p._staging, d._staging)


@pytest.fixture
async def staging() -> AsyncIterator[StagingStore]:
    """Yields the staging store of a lead in this process."""
    async with served() as server:
        yield server._staging
