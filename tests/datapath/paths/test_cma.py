"""Data path cma: the process that is read is the one that made the offer, and it is alive after the last byte."""

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvgrpc.core.values.endpoints import CmaEndpoint, MemoryKind, RankEndpoint, Segment
from kvgrpc.datapath.base import DataPathFailed, DataPathUnavailable, PostingState
from kvgrpc.datapath.copy.crew import PiecesPosting
from kvgrpc.datapath.host import libc, process
from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.datapath.paths.cma import CmaPath
from tests.datapath.peers import (
    CASES,
    DEADLINE_S,
    GUARD,
    Bytes,
    Case,
    ProcessPeer,
    Wake,
    finish,
    make_cma,
    move,
    open_descriptors,
    private,
    reach,
    runs_of,
)

CMA = next(case for case in CASES if case.name == "cma")
PAGE = mmap.PAGESIZE


@pytest.fixture(scope="module")
def peer() -> Iterator[ProcessPeer]:
    peer = ProcessPeer(CMA, 1, (1 << 20,))
    yield peer
    peer.close()


@pytest.fixture
def own() -> Iterator[tuple[CmaPath, Any]]:
    memory = np.full(1 << 20, GUARD, dtype=np.uint8)
    path = CmaPath(PrivateMemory.of(memory))
    yield path, memory
    path.close()


def part_of(peer: ProcessPeer) -> CmaEndpoint:
    part = peer.endpoint().cma
    assert part is not None
    return part


def test_a_process_that_is_gone_is_refused_with_the_reason(own: tuple[CmaPath, Any]) -> None:
    victim = ProcessPeer(CMA, 2, (4096,))
    endpoint = victim.endpoint()
    victim.kill()
    victim.close()
    with pytest.raises(DataPathUnavailable, match="cannot be reached"):
        reach(own[0], endpoint)


def test_a_list_of_memory_that_makes_no_sense_is_refused(peer: ProcessPeer, own: tuple[CmaPath, Any]) -> None:
    part = part_of(peer)
    good = part.segments[0]
    for change in (
        {"segments": ()},
        {"segments": (replace(good, nbytes=0),)},
        {"segments": (replace(good, address=-1),)},
        {"segments": (replace(good, address=1 << 64),)},
        {"segments": (replace(good, nbytes=1 << 61),) * 3},
        {"segments": (replace(good, kind=MemoryKind.CUDA),)},
        {"segments": (good,) * ((1 << 16) + 1)},
    ):
        with pytest.raises(DataPathUnavailable):
            reach(own[0], RankEndpoint(0, cma=replace(part, **change)))


def test_a_peer_that_died_after_the_last_byte_fails_the_check(own: tuple[CmaPath, Any]) -> None:
    """All bytes had arrived, but the peer may have been dying while it was read."""
    victim = ProcessPeer(CMA, 3, (1 << 20,))
    remote = reach(own[0], victim.endpoint())
    process, source = remote._process, remote._source[0]
    row = np.array([(own[1].ctypes.data, source.address, 4096)], dtype=np.int64)
    process.read(row)
    process.check()
    victim.kill()
    with pytest.raises(DataPathFailed, match="process"):
        process.check()
    assert np.array_equal(own[1][:4096], victim.content[:4096])
    remote.close()
    victim.close()


def test_a_peer_that_dies_while_a_posting_waits_fails_it(own: tuple[CmaPath, Any]) -> None:
    victim = ProcessPeer(CMA, 3, (1 << 20,))
    remote = reach(own[0], victim.endpoint())
    go = threading.Event()

    def wait(_: int) -> None:
        go.wait(DEADLINE_S)

    busy = PiecesPosting(own[0]._crew.size, wait, lambda: None)
    own[0]._crew.start(busy)
    wake = Wake()
    posting = remote.read(runs_of((0, 0, 1 << 20), (0, 0, 1)), wake)  # more than is read at once
    assert posting.poll() is PostingState.PENDING
    victim.kill()
    go.set()
    assert finish(own[0], posting, wake) is PostingState.FAILED
    assert "no such process" in posting.error
    assert (own[1] == GUARD).all()
    remote.close()
    victim.close()


def test_an_early_end_of_a_call_is_resumed_where_it_stopped() -> None:
    rows = np.array([(1000, 5000, 10), (2000, 6000, 20), (3000, 7000, 30)], dtype=np.int64)
    assert process._after(rows, 60).tolist() == []
    assert process._after(rows, 10).tolist() == rows[1:].tolist()
    assert process._after(rows, 15).tolist() == [[2005, 6005, 15], [3000, 7000, 30]]
    assert process._after(rows, 3).tolist()[0] == [1003, 5003, 7]


def holed(_: tuple[int, ...]) -> tuple[PrivateMemory, list[Bytes]]:
    """Makes a page of memory, with a page behind it that is offered but not mapped."""
    hole = mmap.mmap(-1, 2 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(hole))
    ctypes.CDLL(None).munmap(ctypes.c_void_p(address + PAGE), ctypes.c_size_t(PAGE))
    return PrivateMemory([Segment(address, 2 * PAGE)], owners=hole), [np.frombuffer(hole, dtype=np.uint8)[:PAGE]]


def test_rows_before_a_hole_arrive_and_the_hole_is_an_error(own: tuple[CmaPath, Any]) -> None:
    """The kernel ends the call early at the hole; the next call reports the error."""
    peer = ProcessPeer(Case("cma-hole", make_cma, holed, private), 4, (PAGE,))
    remote = reach(own[0], peer.endpoint())
    posting = move(own[0], remote, runs_of((0, 0, PAGE), (PAGE, PAGE, 10), (0, 3 * PAGE, 10)))
    assert posting.poll() is PostingState.FAILED
    assert "not mapped" in posting.error
    assert np.array_equal(own[1][:PAGE], peer.content)
    assert (own[1][PAGE:] == GUARD).all()
    remote.close()
    peer.kill()  # it cannot unmap the missing page
    peer.close()


def test_device_memory_is_neither_offered_nor_a_destination(peer: ProcessPeer) -> None:
    path = CmaPath(PrivateMemory([Segment(1 << 30, 64, MemoryKind.CUDA)]))
    with pytest.raises(DataPathUnavailable, match="device"):
        path.offer(RankEndpoint(0))
    with pytest.raises(DataPathUnavailable, match="device"):
        reach(path, peer.endpoint())
    path.close()


def test_a_reader_can_be_admitted_where_yama_asks_for_it() -> None:
    """Without Yama the kernel does not know this request."""
    if not process._yama():
        with pytest.raises(OSError, match="Invalid argument"):
            libc.admit_tracer(None)
    else:
        libc.admit_tracer(None)
        libc.admit_tracer(os.getppid())


def test_connecting_and_closing_leaks_no_descriptor(peer: ProcessPeer, own: tuple[CmaPath, Any]) -> None:
    reach(own[0], RankEndpoint(0, cma=part_of(peer))).close()
    before = open_descriptors()
    for _ in range(20):
        reach(own[0], RankEndpoint(0, cma=part_of(peer))).close()
        with pytest.raises(DataPathUnavailable):
            reach(own[0], RankEndpoint(0, cma=replace(part_of(peer), segments=(Segment(PAGE, PAGE),))))
    assert open_descriptors() <= before
