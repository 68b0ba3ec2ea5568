"""Copies out of the staging arena: a copy that was stopped is at rest once that is reported."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvgrpc.core.actions import Post
from kvgrpc.core.events import PeerMapped, PostingEnded, Rekeyed
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.core.values.strips import Repack, Strip
from kvgrpc.datapath.base import DataPathFailed, PostingState
from kvgrpc.datapath.copy import strips
from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.datapath.mover import Mover
from kvgrpc.datapath.reports import Disconnected, Report
from kvgrpc.datapath.staging_arena import StagingArena
from tests.datapath.movers import DONE, HeldWritten
from tests.datapath.peers import DEADLINE_S, GUARD, Bytes, runs_of

SIZE = 32 << 20
RUN = 16
MANY = Repack(
    (Strip(np.zeros(SIZE >> 16, np.int64), np.arange(SIZE >> 16) << 16, (4096,), (RUN,), (RUN,), RUN),), 1 << 16
)
"""Re-pack of the whole memory, in two million runs."""
QUIET_S = 0.1


@pytest.fixture
def memory() -> Bytes:
    return np.zeros(SIZE, dtype=np.uint8)


def test_a_copy_that_is_stopped_is_over_and_the_next_one_runs(memory: Bytes) -> None:
    staging = StagingArena(0, PrivateMemory.of(memory), 1, 1 << 20)
    claim = staging.claim(MANY.staging_bytes, lambda: None)
    assert claim.buffer is not None
    stopped = staging.start(MANY, claim.buffer, lambda: None)
    staging.stop()
    assert stopped.poll() is not PostingState.PENDING
    ended = threading.Event()
    again = staging.start(MANY, claim.buffer, ended.set)
    assert ended.wait(DEADLINE_S)
    assert again.poll() is DONE
    staging.end(claim, at_rest=True)
    staging.close()
    with pytest.raises(DataPathFailed, match="closed"):
        staging.start(MANY, claim.buffer, lambda: None)


@pytest.fixture
def held_copies(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Makes copies wait before they write; returns the events "a copy waits" and "copies go on"."""
    came, go_on = threading.Event(), threading.Event()
    copy = strips.copier()

    def held(strip: Strip) -> None:
        came.set()
        assert go_on.wait(DEADLINE_S)
        copy(strip)

    monkeypatch.setattr(strips, "copier", lambda: held)
    return came, go_on


@pytest.mark.parametrize("how", ["rekey", "close"])
def test_a_re_pack_under_way_ends_with_its_data_path(
    memory: Bytes, held_copies: tuple[threading.Event, threading.Event], how: str
) -> None:
    memory[:] = GUARD
    came, go_on = held_copies
    held = HeldWritten()
    held.state = DONE
    reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
    mover = Mover(1, PrivateMemory.of(memory), [held], reports.put)
    mover.start()
    mover.connect("h", RankEndpoint(0), ["held"])
    assert isinstance(reports.get(timeout=DEADLINE_S), PeerMapped)
    mover.post(Post(1, "a", "h", runs_of((0, 0, 64)), "t", repack=MANY))
    assert came.wait(DEADLINE_S)
    with ThreadPoolExecutor(1) as thread:
        stopped = thread.submit(mover.rekey) if how == "rekey" else thread.submit(mover.close, 0.0)
        with pytest.raises(queue.Empty):  # a copy that is running may still write
            reports.get(timeout=QUIET_S)
        go_on.set()
        ended = reports.get(timeout=DEADLINE_S)
        at_the_end = memory.copy()
        assert stopped.result(DEADLINE_S) in (None, True)
    assert isinstance(ended, PostingEnded)
    assert (ended.done, ended.quiesced, ended.nbytes) == (False, True, 0)
    assert 0 < np.count_nonzero(at_the_end != GUARD) < SIZE
    if how == "rekey":
        assert [type(reports.get(timeout=DEADLINE_S)) for _ in range(2)] == [Disconnected, Rekeyed]
        assert mover.close(0.0)
    assert np.array_equal(memory, at_the_end)


def test_no_memory_for_an_arena_refuses_what_needs_it(memory: Bytes) -> None:
    staging = StagingArena(0, PrivateMemory.of(memory), 1, 1 << 62)
    claim = staging.claim(64, lambda: None)
    assert claim.buffer is None
    assert f"no memory for a staging buffer of {1 << 62} bytes" in claim.refused
    staging.end(claim, at_rest=True)
    staging.close()
