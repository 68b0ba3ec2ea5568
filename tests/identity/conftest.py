"""Tests here call the gate themselves, which says for the rest of the process who calls."""

from collections.abc import Iterator

import pytest

from kvgrpc.core.values.owners import ANONYMOUS
from kvgrpc.service.callers import PRINCIPAL
from kvgrpc.service.identity.gate import CALLER, NOBODY


@pytest.fixture(autouse=True)
def nobody_calls_afterwards() -> Iterator[None]:
    """Ends what a test said about its caller."""
    yield
    CALLER.set(NOBODY)
    PRINCIPAL.set(ANONYMOUS)
