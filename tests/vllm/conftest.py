"""Engines that many tests share: a pair takes a minute to start."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.exits import rdma_hosts
from tests.vllm.cores import Core, Cores
from tests.vllm.engines import DATA_PATHS, Engines, Pair, write_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What ends engines comes last: the next test would wait a minute for new ones."""
    items.sort(key=lambda item: "test_deaths" in item.nodeid)


@pytest.fixture(params=[True, False], ids=["overlap", "in-order"])
def cores(request: pytest.FixtureRequest) -> Iterator[Cores]:
    """Of engines that run steps while hooks are called, or one after the other."""
    p, d = Core("P", overlap=request.param), Core("D", overlap=request.param)
    yield p, d
    p.close()
    d.close()


@pytest.fixture
def in_order() -> Iterator[Cores]:
    """Of engines that run steps one after the other; for what has nothing to do with steps."""
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
    """Engines that fail what they cannot load, over one data path."""
    with closing(Pair(engines, data_paths=[request.param], offer_ttl_s=60.0)) as pair:
        yield pair


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    """Both serve, and nothing is left of the test before. After it, nothing may be left either."""
    shared_pair.start()
    yield shared_pair
    shared_pair.at_rest()


@pytest.fixture(scope="session")
def rdma_host(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process on a host with RDMA adapters."""
    return rdma_hosts.environment(tmp_path_factory.mktemp("rdma-host"))
