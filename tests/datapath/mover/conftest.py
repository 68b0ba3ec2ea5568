"""Fixtures of ranks for the tests of the mover."""

from collections.abc import Iterator

import pytest

from kvgrpc.datapath.host.memory import PrivateMemory
from tests.datapath.loopback import Faults, LoopbackPath
from tests.datapath.movers import AT_SOURCE, NBYTES, Rank
from tests.datapath.peers import content


@pytest.fixture
def source() -> Iterator[LoopbackPath]:
    """Makes a peer named "source" in this process, full of known bytes."""
    path = LoopbackPath(PrivateMemory.of(content(1, NBYTES)), "source")
    yield path
    path.close()


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def rank(source: LoopbackPath, faults: Faults) -> Iterator[Rank]:
    rank = Rank(lambda memory: [LoopbackPath(memory, "own", faults)])
    yield rank
    assert rank.mover.close(0.0)


@pytest.fixture
def linked(rank: Rank) -> Rank:
    rank.connect("p", AT_SOURCE)
    return rank
