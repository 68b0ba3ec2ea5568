"""The system, started once for each data path."""

from collections.abc import Iterator

import pytest

from tests.hosts.system import PATHS, System, running
from tests.service.conftest import TEST_S


@pytest.fixture(scope="session", params=PATHS)
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running(tmp_path_factory.mktemp("system"), request.param) as made:
        yield made


@pytest.fixture
def system(started: System) -> Iterator[System]:
    """Yields the system with a whole network. Afterwards everything has to come to rest by itself."""
    yield started
    started.restore()
    for engine in started.engines.values():
        engine.reset()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "hosts":
            item.add_marker(pytest.mark.timeout(TEST_S))
