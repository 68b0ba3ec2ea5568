"""The operator's bandwidth limit of a rank."""

import time

import numpy as np
import pytest

from kvgrpc.core.events import PostingEnded
from kvgrpc.datapath.base import PostingState
from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.datapath.mover import Mover
from kvgrpc.datapath.settings import MoverSettings
from kvgrpc.errors import InvalidRequest
from tests.datapath.loopback import LoopbackPath
from tests.datapath.movers import AT_SOURCE, NBYTES, WHOLE, Rank
from tests.datapath.peers import GUARD, content, runs_of

DONE, FAILED = PostingState.DONE, PostingState.FAILED


def test_a_bandwidth_limit_is_not_exceeded(source: LoopbackPath) -> None:
    limit = 8 * NBYTES
    rank = Rank(lambda m: [LoopbackPath(m, "own")], bandwidth_limit_bytes_per_s=limit)
    rank.connect("p", AT_SOURCE)
    began = time.monotonic()
    rank.post("a", "p", WHOLE)
    rank.post("b", "p", runs_of(*((i * 4096, i * 4096, 4096) for i in range(256))))
    assert {rank.next(PostingEnded).posting_id for _ in range(2)} == {"a", "b"}
    elapsed = time.monotonic() - began
    assert 2 * NBYTES / elapsed <= limit
    assert np.array_equal(rank.bytes, content(1, NBYTES))
    assert rank.mover.close(0.0)


def test_postings_share_a_bandwidth_limit_so_that_a_short_one_passes_a_long_one(source: LoopbackPath) -> None:
    rank = Rank(lambda m: [LoopbackPath(m, "own")], bandwidth_limit_bytes_per_s=4 * NBYTES)
    rank.connect("p", AT_SOURCE)
    rank.post("long", "p", WHOLE)
    rank.post("short", "p", runs_of((0, 0, 4096)))
    assert [rank.next(PostingEnded).posting_id for _ in range(2)] == ["short", "long"]
    assert rank.mover.close(0.0)


def test_under_a_limit_all_runs_are_checked_before_the_first_byte(source: LoopbackPath) -> None:
    rank = Rank(lambda m: [LoopbackPath(m, "own")], bandwidth_limit_bytes_per_s=1e9)
    rank.connect("p", AT_SOURCE)
    for bad in ((NBYTES, 0, 1), (0, NBYTES, 1)):
        rank.post("a", "p", runs_of((0, 0, NBYTES), bad))
        assert rank.next(PostingEnded).done is False
    rank.post("a", "p", runs_of())
    assert rank.next(PostingEnded).done
    assert (rank.bytes == GUARD).all()
    assert rank.mover.close(0.0)


@pytest.mark.parametrize("limit", [0.0, -1.0])
def test_a_bandwidth_limit_that_moves_nothing_is_refused(limit: float) -> None:
    memory = PrivateMemory.of(bytearray(64))
    with pytest.raises(InvalidRequest):
        Mover(0, memory, [], print, MoverSettings(limit))
