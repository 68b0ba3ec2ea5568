"""Environment of processes on a host with RDMA adapters."""

import pytest

from tests.exits import rdma_hosts


@pytest.fixture(scope="session")
def rdma_host(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns the environment of a process on a host with RDMA adapters."""
    return rdma_hosts.environment(tmp_path_factory.mktemp("rdma-host"))
