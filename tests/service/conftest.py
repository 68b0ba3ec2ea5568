"""Two engines that every test of this folder may use, and a maker of others.

The pair is shared by all tests of a worker process: a test leaves nothing behind, which `reset` checks.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import pytest

from tests.service.engines import HOME, SMALL_POOL, Engine, ServeProcess

# A lease of another test must not run out in the middle of this one. All other limits are the defaults: a test whose
# rule is about a limit starts an engine of its own with a short one.
SETTINGS = "[limits]\nlease_ttl_s = 300.0\n"
TEST_S = 240
"""Most of a test that starts processes is waiting for them on a busy machine."""
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
    """The engine whose blocks are read."""
    yield shared_pair[0]
    shared_pair[0].reset()


@pytest.fixture
def destination(shared_pair: tuple[Engine, Engine], source: Engine) -> Iterator[Engine]:
    """The engine whose blocks are filled. It is reset first: a pull that it ends closes its access at the source."""
    yield shared_pair[1]
    shared_pair[1].reset()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts engines of its own for a test, all at once: one for each tuple of flags."""
    with starting(tmp_path) as begin:
        yield begin


@contextmanager
def starting(folder: Path) -> Iterator[Start]:
    """As `start`, for as long as the context lasts."""
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
