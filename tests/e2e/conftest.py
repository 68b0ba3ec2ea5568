"""Tests of what happens between processes, over each data path."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.conftest import TEST_S, Start, start, starting
from tests.service.engines import Engine

__all__ = ["start"]

Pair = tuple[Engine, Engine]
"""Source and destination."""
# By name of the case: flags of both servers, and their environment.
PATHS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "shm": (("--data-paths", "shm"), {}),
    "window": (("--data-paths", "window"), {}),
    "cma": (("--data-paths", "cma"), {}),
    "nixl": (("--data-paths", "nixl"), {}),
    "nixl-tcp": (("--data-paths", "nixl"), {"UCX_TLS": "tcp"}),
    "collective": (("--data-paths", "collective"), {}),
}


def begin(start: Start, path: str, *slow: str) -> Pair:
    flags, environment = PATHS[path]
    source, destination = start(flags, (*flags, *slow), **environment)
    return source, destination


@pytest.fixture(scope="module", params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def shared(path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Returns two servers for all tests of a data path."""
    with starting(tmp_path_factory.mktemp("pair")) as start:
        yield begin(start, path)


@pytest.fixture
def pair(shared: Pair) -> Iterator[Pair]:
    """Returns an empty source and an empty destination."""
    yield shared
    for engine in reversed(shared):
        engine.reset()


def scattered(engine: Engine, count: int) -> list[int]:
    """Returns unsorted blocks with gaps, so that nothing may rely on long runs."""
    ids = engine.allocate(2 * count)
    return ids[::2][::-1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TEST_S))
