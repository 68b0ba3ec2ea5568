"""Servers that all tests share, because they take a minute to start."""

from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.sglang.servers import Pair, Server, write_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips all tests where SGLang is missing, and moves those that end servers to the end."""
    items.sort(key=lambda item: "test_deaths" in item.nodeid)
    if find_spec("sglang") is None:
        for item in items:
            item.add_marker(pytest.mark.skip(reason="sglang is not installed here: `make sglang-test`"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sglang")
    write_model(made / "model")
    return made


@pytest.fixture(scope="session")
def pair(folder: Path) -> Iterator[Pair]:
    """Yields prefill and decode, whose pages differ, and an engine that does both."""
    with ExitStack() as stack:
        made = Pair(
            Server("P", folder, "prefill", page_tokens=16),
            Server("D", folder, "decode", page_tokens=32),
            Server("one", folder, "", page_tokens=16),
        )
        for server in made:
            stack.callback(server.stop)
            server.start()
        for server in made:
            server.wait()
        yield made
