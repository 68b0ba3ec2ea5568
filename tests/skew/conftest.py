"""Servers of two versions, for `make skew-test`."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.service.conftest import TEST_S
from tests.service.engines import Engine
from tests.skew.versions import TREE, WHEEL, Version, serving, unpacked

Pair = tuple[Engine, Engine]
"""Source and destination."""
DATA_PATHS = ("shm", "cma", "nixl", "collective")
OTHERS = {"wheel to tree": (True, False), "tree to wheel": (False, True)}
"""Which of source and destination is of the wheel."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TEST_S))


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Version]:
    """Returns the version of the wheel under True, and that of the tree under False."""
    wheel = Path(os.environ[WHEEL]).resolve()
    return {True: unpacked(wheel, tmp_path_factory.mktemp("wheel")), False: TREE}


@pytest.fixture(scope="module", params=OTHERS)
def others(request: pytest.FixtureRequest) -> tuple[bool, bool]:
    return OTHERS[request.param]


@pytest.fixture(scope="module", params=DATA_PATHS)
def path(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def shared(
    versions: dict[bool, Version], others: tuple[bool, bool], path: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """Yields a source and a destination of two versions, for all tests of a data path."""
    folder = tmp_path_factory.mktemp("pair")
    with ExitStack() as stack:
        source, destination = (
            stack.enter_context(serving(versions[other], folder / name, "--data-paths", path))
            for name, other in zip(("source", "destination"), others, strict=True)
        )
        yield source, destination


@pytest.fixture
def pair(shared: Pair) -> Iterator[Pair]:
    """Yields an empty source and an empty destination."""
    yield shared
    for engine in reversed(shared):
        engine.reset()
