"""Engines of any two modes."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvgrpc.core.policy.values import ModeChoice, OnLoss
from tests.vllm.cores import Core, Cores
from tests.vllm.modes.legs import Made


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Yields a function that makes engines of two modes and pairing secrets, where D computes what does not come."""
    monkeypatch.setenv("KVGRPC_LIMITS_ANNOUNCE_WAIT_S", "2")
    with ExitStack() as stack:

        def make(p_mode: ModeChoice, d_mode: ModeChoice, p_secret: bytes = b"", d_secret: bytes = b"") -> Cores:
            pair = (
                Core("P", mode=p_mode, pairing_secret=p_secret),
                Core("D", OnLoss.RECOMPUTE, mode=d_mode, pairing_secret=d_secret),
            )
            for core in pair:
                stack.callback(core.close)
            return pair

        yield make
