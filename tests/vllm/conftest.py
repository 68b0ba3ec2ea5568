"""Engines that many tests share, because a pair takes a minute to start."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.exits import rdma_hosts
from tests.vllm.cores import Core, Cores
from tests.vllm.engines import DATA_PATHS, Engines, Pair, write_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves tests that end engines to the end: the next test would wait a minute for new ones."""
    items.sort(key=lambda item: "test_deaths" in item.nodeid)


@pytest.fixture(params=[True, False], ids=["overlap", "in-order"])
def cores(request: pytest.FixtureRequest) -> Iterator[Cores]:
    """Yields engines that run steps while hooks are called, or in order."""
    p, d = Core("P", overlap=request.param), Core("D", overlap=request.param)
    yield p, d
    p.close()
    d.close()


@pytest.fixture
def in_order() -> Iterator[Cores]:
    """Yields engines that run steps in order, for tests that do not depend on steps."""
    p, d = Core("P", overlap=False, offer_ttl_s=60.0), Core("D", overlap=False, offer_ttl_s=60.0)
    yield p, d
    p.close()
    d.close()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm")
    write_model(folder / "model")
    return folder


@pytest.fixture(scope="session")
def engines(model_folder: Path) -> Iterator[Engines]:
    engines = Engines(model_folder)
    yield engines
    engines.stop()


@pytest.fixture(scope="session", params=DATA_PATHS)
def shared_pair(request: pytest.FixtureRequest, engines: Engines) -> Iterator[Pair]:
    """Yields engines over one data path that fail what they cannot load."""
    with closing(Pair(engines, data_paths=[request.param], offer_ttl_s=60.0)) as pair:
        yield pair


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    """Yields a running pair with nothing left of earlier tests. The test may leave nothing either."""
    shared_pair.start()
    yield shared_pair
    shared_pair.at_rest()


@pytest.fixture(scope="session")
def rdma_host(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns the environment of a process on a host with RDMA adapters."""
    return rdma_hosts.environment(tmp_path_factory.mktemp("rdma-host"))
