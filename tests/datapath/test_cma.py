"""Path cma: the process that is read is the one that offered, and alive after the last byte."""

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvgrpc.core.endpoints import CmaEndpoint, MemoryKind, ProcessEndpoint, RankEndpoint, Segment
from kvgrpc.datapath import libc, process
from kvgrpc.datapath.base import DataPathFailed, DataPathUnavailable, PostingState
from kvgrpc.datapath.cma import CmaPath
from kvgrpc.datapath.crew import PiecesPosting
from kvgrpc.datapath.memory import PrivateMemory, SharedMemory
from tests.datapath.peers import (
    CASES,
    DEADLINE_S,
    GUARD,
    ProcessPeer,
    Wake,
    content,
    finish,
    move,
    open_descriptors,
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


def test_another_process_of_the_same_number_is_not_the_peer(peer: ProcessPeer, own: tuple[CmaPath, Any]) -> None:
    part = part_of(peer)
    wrong = replace(part, process=replace(part.process, nonce=b"n" * 32))
    with pytest.raises(DataPathUnavailable, match="not the peer"):
        own[0].connect(RankEndpoint(0, cma=wrong))
    # Here the address is not mapped, or holds something else.
    with pytest.raises(DataPathUnavailable):
        own[0].connect(RankEndpoint(0, cma=replace(part, process=replace(part.process, pid=os.getppid()))))


def test_a_process_that_is_gone_is_refused_with_the_reason(own: tuple[CmaPath, Any]) -> None:
    victim = ProcessPeer(CMA, 2, (4096,))
    endpoint = victim.endpoint()
    victim.kill()
    victim.close()
    with pytest.raises(DataPathUnavailable, match="no such process"):
        own[0].connect(endpoint)


def test_a_list_of_memory_that_makes_no_sense_is_refused(peer: ProcessPeer, own: tuple[CmaPath, Any]) -> None:
    part = part_of(peer)
    good = part.segments[0]
    for change in (
        {"process": replace(part.process, pid=0)},
        {"process": replace(part.process, pid=-1)},
        {"process": replace(part.process, pid=1 << 40)},
        {"process": replace(part.process, nonce=b"")},
        {"process": replace(part.process, nonce_address=0)},
        {"process": replace(part.process, nonce_address=1 << 63)},
        {"segments": ()},
        {"segments": (replace(good, nbytes=0),)},
        {"segments": (replace(good, address=-1),)},
        {"segments": (replace(good, address=1 << 64),)},
        {"segments": (replace(good, nbytes=1 << 61),) * 3},
        {"segments": (replace(good, kind=MemoryKind.CUDA),)},
        {"segments": (good,) * ((1 << 16) + 1)},
    ):
        with pytest.raises(DataPathUnavailable):
            own[0].connect(RankEndpoint(0, cma=replace(part, **change)))


def test_memory_that_is_not_mapped_at_the_peer_fails_the_posting(peer: ProcessPeer, own: tuple[CmaPath, Any]) -> None:
    lies = replace(part_of(peer), segments=(Segment(PAGE, 1 << 20),))
    remote = own[0].connect(RankEndpoint(0, cma=lies))
    posting = move(own[0], remote, runs_of((0, 0, 4096)))
    assert posting.poll() is PostingState.FAILED
    assert "not mapped" in posting.error
    assert (own[1] == GUARD).all()
    remote.close()


def test_a_peer_that_died_after_the_last_byte_fails_the_check(own: tuple[CmaPath, Any]) -> None:
    """All bytes were there, yet what died may have been dying when it was read."""
    victim = ProcessPeer(CMA, 3, (1 << 20,))
    remote = own[0].connect(victim.endpoint())
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
    remote = own[0].connect(victim.endpoint())
    go = threading.Event()

    def wait(_: int) -> None:
        go.wait(DEADLINE_S)

    busy = PiecesPosting(own[0]._crew.size, wait, lambda: None)
    own[0]._crew.start(busy)
    wake = Wake()
    posting = remote.read(runs_of((0, 0, 1 << 20)), wake)
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


def test_rows_before_a_hole_arrive_and_the_hole_is_an_error(own: tuple[CmaPath, Any]) -> None:
    """The kernel ends the call early at the hole; the next call names the error."""
    hole = mmap.mmap(-1, 2 * PAGE)
    hole[:] = b"\7" * (2 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(hole))
    ctypes.CDLL(None).munmap(ctypes.c_void_p(address + PAGE), ctypes.c_size_t(PAGE))
    path = CmaPath(PrivateMemory([Segment(address, 2 * PAGE)], owners=hole))
    remote = own[0].connect(path.offer(RankEndpoint(0)))
    posting = move(own[0], remote, runs_of((0, 0, PAGE), (PAGE, PAGE, 10), (0, 3 * PAGE, 10)))
    assert posting.poll() is PostingState.FAILED
    assert (own[1][:PAGE] == 7).all()
    assert (own[1][PAGE:] == GUARD).all()
    remote.close()
    path.close()
    # Mapped again, so that the mmap object can let go of all that it believes to have.
    libc_mmap = ctypes.CDLL(None).mmap
    libc_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc_mmap.restype = ctypes.c_void_p
    assert libc_mmap(address + PAGE, PAGE, 3, 0x32, -1, 0) == address + PAGE


def test_device_memory_is_neither_offered_nor_a_destination(peer: ProcessPeer) -> None:
    path = CmaPath(PrivateMemory([Segment(1 << 30, 64, MemoryKind.CUDA)]))
    with pytest.raises(DataPathUnavailable, match="device"):
        path.offer(RankEndpoint(0))
    with pytest.raises(DataPathUnavailable, match="device"):
        path.connect(peer.endpoint())
    path.close()


def test_shared_pools_can_be_read_too(own: tuple[CmaPath, Any]) -> None:
    pool = SharedMemory.create(1 << 20)
    pool.as_numpy()[:] = content(9, 1 << 20)
    source = CmaPath(pool)
    remote = own[0].connect(source.offer(RankEndpoint(0)))
    assert move(own[0], remote, runs_of((0, 0, 1 << 20))).poll() is PostingState.DONE
    assert np.array_equal(own[1], pool.as_numpy())
    remote.close()
    source.close()
    pool.close()


def test_what_the_kernel_forbids_is_said_in_words(own: tuple[CmaPath, Any]) -> None:
    """Process 1 is not ours, or the test runs as root and finds another nonce there."""
    segment = Segment(PAGE, PAGE)
    part = CmaEndpoint(ProcessEndpoint(1, b"n" * 32, PAGE), (segment,))
    with pytest.raises(DataPathUnavailable, match=r"process 1"):
        own[0].connect(RankEndpoint(0, cma=part))


def test_a_reader_can_be_admitted_where_yama_asks_for_it() -> None:
    """Without Yama the kernel knows no such request."""
    if not process._yama():
        with pytest.raises(OSError, match="Invalid argument"):
            libc.admit_tracer(None)
    else:
        libc.admit_tracer(None)
        libc.admit_tracer(os.getppid())


def test_connecting_and_closing_leaks_no_descriptor(peer: ProcessPeer, own: tuple[CmaPath, Any]) -> None:
    part = part_of(peer)
    before = open_descriptors()
    for _ in range(20):
        own[0].connect(RankEndpoint(0, cma=part)).close()
        with pytest.raises(DataPathUnavailable):
            own[0].connect(RankEndpoint(0, cma=replace(part, process=replace(part.process, nonce=b"n" * 32))))
    assert open_descriptors() <= before
