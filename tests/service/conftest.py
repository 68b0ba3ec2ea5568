"""Two engines that every test of this folder may use, and a maker of other engines.

All tests of a worker process share the pair, so a test must leave nothing behind. `reset` checks that.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import pytest

from tests.service.engines import HOME, SMALL_POOL, Engine, ServeProcess

# Leases must not expire during a later test. All other limits are the defaults: a test of a limit starts its own engine
# with a short one.
SETTINGS = "[limits]\nlease_ttl_s = 300.0\n"
TEST_S = 240
"""Time limit of tests that start processes, in seconds. On a busy machine they mostly wait for them."""
SHARED = ("--listen", f"{HOME}:0", "--read-blocks", "--drain-s", "0", "--data-paths", "shm", *SMALL_POOL)

Start = Callable[..., list[Engine]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TEST_S))


@pytest.fixture(scope="session")
def shared_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    folder = tmp_path_factory.mktemp("pair")
    processes = [ServeProcess(folder / name, *SHARED, settings=SETTINGS) for name in ("source", "destination")]
    source, destination = (Engine(process) for process in processes)
    yield source, destination
    for engine in (source, destination):
        engine.close()


@pytest.fixture
def source(shared_pair: tuple[Engine, Engine]) -> Iterator[Engine]:
    """Yields the engine whose blocks are read."""
    yield shared_pair[0]
    shared_pair[0].reset()


@pytest.fixture
def destination(shared_pair: tuple[Engine, Engine], source: Engine) -> Iterator[Engine]:
    """Yields the engine whose blocks are filled. It is reset first: its pulls close their accesses at the source."""
    yield shared_pair[1]
    shared_pair[1].reset()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a test's own engines, all at once: one for each tuple of flags."""
    with starting(tmp_path) as begin:
        yield begin


@contextmanager
def starting(folder: Path) -> Iterator[Start]:
    """Starts engines like `start`, for the duration of the context."""
    numbers = count()
    with ExitStack() as stack:

        def begin(*flags: tuple[str, ...], settings: str = SETTINGS, **environment: str) -> list[Engine]:
            folders = [folder / f"engine-{next(numbers)}" for _ in flags]
            processes = [
                ServeProcess(own, *SHARED, *row, settings=settings, environment=environment)
                for own, row in zip(folders, flags, strict=True)
            ]
            for process in processes:
                stack.callback(process.end)
            engines = [Engine(process) for process in processes]
            for engine in engines:
                stack.callback(engine.api.close)
            return engines

        yield begin
