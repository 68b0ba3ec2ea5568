"""Every test here is about what happens between processes."""

from pathlib import Path

import pytest

from tests.service.conftest import TEST_S, start

__all__ = ["start"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TEST_S))
