"""Fixtures for both halves of a Gloo group, and the memory of its ranks."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from kvgrpc.datapath.collective.gloo import GlooGroup
from kvgrpc.datapath.collective.rendezvous import Rendezvous
from kvgrpc.datapath.host.memory import PrivateMemory
from tests.datapath.halves import Half, Halves
from tests.datapath.peers import Bytes, content
from tests.datapath.pumped import HOST

NBYTES = 8 << 20
Made = tuple[Halves, Bytes, Bytes]


def gloo(sends: bool, rendezvous: Rendezvous) -> GlooGroup:
    return GlooGroup(sends=sends, host=HOST, rendezvous=rendezvous)


@pytest.fixture
def made() -> Iterator[Made]:
    """Makes a group whose halves have not met."""
    source, destination = content(1, NBYTES), np.zeros(NBYTES, dtype=np.uint8)
    halves = Halves(
        *(
            Half(partial(gloo, sends), PrivateMemory.of(memory).segments, sends=sends)
            for sends, memory in ((True, source), (False, destination))
        )
    )
    yield halves, source, destination
    halves.close()
