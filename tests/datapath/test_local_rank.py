"""A rank in the lead's own process keeps memory that is not at rest."""

import gc
import weakref

import numpy as np
import pytest

from kvgrpc.core.events import Event
from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.datapath.local_rank import LocalRank
from tests.datapath.movers import Held


@pytest.mark.parametrize("closes", [True, False])
def test_memory_that_is_not_at_rest_is_kept_for_ever(closes: bool) -> None:
    held, events = Held(), list[Event]()
    held.break_at = "" if closes else "close"
    tensor = np.zeros(64, dtype=np.uint8)
    watched = weakref.ref(tensor)
    rank = LocalRank(0, PrivateMemory.of(tensor), [held], events.append)
    assert rank.close(0.0) is closes
    assert rank.close(0.0) is closes
    del tensor, rank
    gc.collect()
    assert (watched() is None) is closes
