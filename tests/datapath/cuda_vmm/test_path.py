"""A destination's use of its source's GPU memory, and its end, on a driver of fake GPUs with real processes, sockets,
descriptors and mappings.
"""

import ctypes
import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from kvgrpc.core.values.endpoints import AllocationSpan, MemoryKind, RankEndpoint, Segment
from kvgrpc.datapath.base import DataPathFailed, PostingState
from kvgrpc.datapath.cuda_vmm import path as module
from kvgrpc.datapath.cuda_vmm.path import CudaVmmPath, CudaVmmRemote
from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.datapath.mirror.lane import CopyLost
from tests.datapath.cuda_vmm.fake_driver import OTHER_GPU, UNIT, ExportedMemory, FakeDriver, plain, view
from tests.datapath.cuda_vmm.ranks import NBYTES, SIZES, WHOLE, Rank, destination, filled, source
from tests.datapath.peers import (
    CASES,
    DEADLINE_S,
    GUARD,
    ProcessPeer,
    Wake,
    content,
    finish,
    move,
    reach,
    runs_of,
)

(CASE,) = [case for case in CASES if case.name == "cuda_vmm"]


def write_into(endpoint: RankEndpoint) -> None:
    memory, _ = plain((NBYTES,))
    remote = reach(CudaVmmPath(memory, FakeDriver()), endpoint)
    segment = remote._mappings.segments[0]
    assert view(segment.address, 4).tobytes() == content(7, NBYTES)[:4].tobytes()
    ctypes.memset(segment.address, 0, 1)


def test_a_reader_that_writes_gets_a_fault_and_the_source_keeps_its_bytes() -> None:
    with source() as rank:
        written = filled(rank, 7)
        reader = multiprocessing.get_context("spawn").Process(
            target=write_into, args=(rank.path.offer(RankEndpoint(0)),), daemon=True
        )
        reader.start()
        reader.join(DEADLINE_S)
        assert reader.exitcode == -signal.SIGSEGV
        assert isinstance(rank.memory, ExportedMemory)
        assert np.array_equal(np.concatenate(rank.memory.views()), written)


def test_a_copy_under_way_goes_on_when_the_source_is_killed() -> None:
    with destination() as (rank, array):
        peer = ProcessPeer(CASE, 8, SIZES)
        remote = reach(rank.path, peer.endpoint())
        rank.driver.held = []
        wake = Wake()
        posting = remote.read(WHOLE, wake)
        while not rank.driver.held:
            wake.event.wait(0.001)
        peer.kill()
        rank.driver.held[0].run()
        assert finish(rank.path, posting, wake) is PostingState.DONE
        assert np.array_equal(array, peer.content)
        assert remote.process is not None
        assert remote.process.ended
        remote.process.close()
        peer.close()


def test_memory_that_its_source_has_freed_is_there_until_its_reader_lets_go() -> None:
    with destination() as (reader, array):
        with source() as rank:
            written = filled(rank, 9)
            remote = reader.reach(rank.offer())
        assert move(reader.path, remote, WHOLE).poll() is PostingState.DONE
        assert np.array_equal(array, written)
        assert remote.process is not None
        remote.process.close()
        remote.close()
        assert reader.driver.left == (0, 0)


def test_a_peer_on_a_gpu_with_peer_access_is_read_by_the_own_one() -> None:
    with source(device=1) as rank, destination() as (reader, array):
        written, part = filled(rank, 10), rank.offer()
        assert part.device_uuid == OTHER_GPU
        remote = reader.reach(part)
        assert move(reader.path, remote, WHOLE).poll() is PostingState.DONE
        assert np.array_equal(array, written)
        theirs, own = (f"GPU-{n * 4}-{n * 2}-{n * 2}-{n * 2}-{n * 6}" for n in ("02", "01"))
        assert remote.why.endswith(f"copied on {theirs}, by {own}")
        assert remote.process is not None
        remote.process.close()


def test_allocations_that_adjoin_are_one_memory_whose_runs_go_through_all_of_them() -> None:
    driver = FakeDriver()
    address = driver.adjoining(5)
    nbytes = 5 * UNIT - 100
    view(address, nbytes)[:] = content(11, nbytes)
    rank = Rank(PrivateMemory([Segment(address, nbytes, MemoryKind.CUDA, 0)]), driver)
    part = rank.offer()
    assert part.allocations == (UNIT,) * 5
    assert part.spans == (*(AllocationSpan(i, 0, UNIT) for i in range(4)), AllocationSpan(4, 0, UNIT - 100))
    with destination(nbytes=nbytes) as (reader, array):
        remote = reader.reach(part)
        run = runs_of((UNIT - 7, 3, 2 * UNIT + 50))
        assert move(reader.path, remote, run).poll() is PostingState.DONE
        assert np.array_equal(array[3 : 2 * UNIT + 53], content(11, nbytes)[UNIT - 7 : 3 * UNIT + 43])
        assert (array[:3] == GUARD).all()
        assert (array[2 * UNIT + 53 :] == GUARD).all()
        assert remote.process is not None
        remote.process.close()
    rank.path.close()


@pytest.fixture
def reading() -> Iterator[tuple[Rank, CudaVmmRemote]]:
    with ExitStack() as ends:
        rank, (reader, _) = ends.enter_context(source()), ends.enter_context(destination())
        remote = reader.reach(rank.offer())
        yield reader, remote
        assert remote.process is not None
        remote.process.close()
        reader.driver.held = None


def test_close_with_a_copy_that_does_not_end_says_so_and_unmaps_nothing(
    reading: tuple[Rank, CudaVmmRemote], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, remote = reading
    monkeypatch.setattr(module, "_REST_S", 0.05)
    held = reader.driver.held = []
    wake = Wake()
    posting = remote.read(WHOLE, wake)
    while not held:
        wake.event.wait(0.001)
    before = reader.driver.left
    for _ in range(2):
        with pytest.raises(DataPathFailed, match="did not end"):
            reader.path.close()
    assert (posting.poll(), reader.driver.left) == (PostingState.PENDING, before)
    held[0].run()
    monkeypatch.setattr(module, "_REST_S", DEADLINE_S)
    reader.path.close()
    assert posting.poll() is PostingState.DONE
    assert reader.driver.left == (0, 0)


def test_a_copy_that_was_lost_is_no_end_and_nothing_is_copied_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REST_S", DEADLINE_S)
    memory, (array,) = plain((NBYTES,))
    with source() as rank:
        reader = Rank(memory, FakeDriver())
        remote = reader.reach(rank.offer())
        reader.driver.failing["cuMemcpyAsync"] = "CUDA_ERROR_ILLEGAL_ADDRESS"
        wake = Wake()
        posting = remote.read(WHOLE, wake)
        assert wake.event.wait(DEADLINE_S)
        with pytest.raises(CopyLost, match="cuMemcpyAsync: CUDA_ERROR_ILLEGAL_ADDRESS"):
            posting.poll()
        reader.driver.failing.clear()
        later = move(reader.path, remote, WHOLE)
        assert later.poll() is PostingState.FAILED
        assert "lost a copy" in later.error
        assert not array.any()
        with pytest.raises(DataPathFailed, match="ended without proof"):
            reader.path.close()
        assert remote.process is not None
        remote.process.close()
