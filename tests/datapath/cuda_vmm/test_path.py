"""Memory of GPUs by descriptors, over a driver of GPUs that are none: processes, sockets, descriptors and mappings are
real.
"""

import ctypes
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvgrpc.core.values.endpoints import CudaVmmEndpoint, MemoryKind, RankEndpoint, Segment, Span
from kvgrpc.datapath.base import DataPathFailed, DataPathUnavailable, PostingState
from kvgrpc.datapath.cuda_vmm import path as module
from kvgrpc.datapath.cuda_vmm.exports import ALLOCATIONS_MAX
from kvgrpc.datapath.cuda_vmm.path import CudaVmmPath, CudaVmmRemote
from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.datapath.host.process_socket import ProcessSocket, Reply
from kvgrpc.datapath.mirror.lane import CopyLost
from tests.datapath.cuda_vmm.fake_driver import (
    GPU,
    OTHER_GPU,
    UNIT,
    ExportedMemory,
    FakeDriver,
    plain,
    view,
)
from tests.datapath.movers import until
from tests.datapath.peers import (
    CASES,
    DEADLINE_S,
    GUARD,
    Bytes,
    ProcessPeer,
    Wake,
    content,
    finish,
    move,
    open_descriptors,
    reach,
    runs_of,
)

SIZES = (3 * UNIT + 5, UNIT)
NBYTES = sum(SIZES)
WHOLE = runs_of((0, 0, NBYTES))
(CASE,) = [case for case in CASES if case.name == "cuda_vmm"]


class Rank:
    """A rank in this process, with its own view of the machine's GPUs."""

    def __init__(self, memory: PrivateMemory, driver: FakeDriver) -> None:
        self.driver = driver
        self.memory = memory
        self.path = CudaVmmPath(memory, driver)

    def offer(self) -> CudaVmmEndpoint:
        part = self.path.offer(RankEndpoint(0)).cuda_vmm
        assert part is not None
        return part

    def reach(self, part: CudaVmmEndpoint) -> CudaVmmRemote:
        remote = reach(self.path, RankEndpoint(0, cuda_vmm=part))
        assert isinstance(remote, CudaVmmRemote)
        return remote

    def refusal(self, part: CudaVmmEndpoint | None) -> str:
        """Why it does not reach that; and nothing of the attempt is left."""
        before = open_descriptors(), self.driver.left
        with pytest.raises(DataPathUnavailable) as refused:
            reach(self.path, RankEndpoint(0, cuda_vmm=part))
        assert (open_descriptors(), self.driver.left) == before
        return refused.value.message


@contextmanager
def source(driver: FakeDriver | None = None, device: int = 0) -> Iterator[Rank]:
    driver = driver or FakeDriver()
    memory = ExportedMemory(SIZES, driver, device)
    rank = Rank(memory, driver)
    try:
        yield rank
    finally:
        rank.path.close()
        memory.close()
        assert driver.left == (0, 0)


@contextmanager
def destination(driver: FakeDriver | None = None, nbytes: int = NBYTES) -> Iterator[tuple[Rank, Bytes]]:
    memory, (array,) = plain((nbytes,))
    array[:] = GUARD
    rank = Rank(memory, driver or FakeDriver())
    try:
        yield rank, array
    finally:
        rank.path.close()
        assert rank.driver.left == (0, 0)


def filled(rank: Rank, seed: int) -> Bytes:
    """What its memory holds from now on."""
    assert isinstance(rank.memory, ExportedMemory)
    made, at = content(seed, NBYTES), 0
    for part in rank.memory.views():
        part[:] = made[at : at + len(part)]
        at += len(part)
    return made


# -- what a reader can do with a peer's memory, and what ends it


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
        assert remote.why.endswith(f"copied on GPU-{'02' * 4}-0202-0202-0202-{'02' * 6}, by GPU-{'01' * 4}-0101-0101-"
                                   f"0101-{'01' * 6}")  # fmt: skip
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
    assert part.spans == (*(Span(i, 0, UNIT) for i in range(4)), Span(4, 0, UNIT - 100))
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


# -- memory of which there are no descriptors


def why_not(memory: PrivateMemory, driver: FakeDriver) -> str:
    """What a rank of that memory tells its peers, and people; it reads theirs all the same."""
    before = driver.left
    rank = Rank(memory, driver)
    part = rank.offer()
    assert driver.left == before
    assert part == CudaVmmEndpoint(why_not=part.why_not)
    assert part.why_not in rank.path.why
    with destination() as (reader, _):
        assert part.why_not in reader.refusal(part)
    with source() as peer:
        remote = rank.reach(peer.offer())
        assert remote.process is not None
        remote.process.close()
        remote.close()
    rank.path.close()
    return part.why_not


def test_memory_of_cuda_malloc_is_not_exported_and_its_peers_hear_why() -> None:
    memory, _ = plain((UNIT,))
    assert why_not(memory, FakeDriver()) == ("memory of cudaMalloc cannot be exported as descriptors; nixl reaches it")


def test_an_allocation_without_a_handle_type_of_descriptors_is_not_exported() -> None:
    driver = FakeDriver()
    driver.exports = False
    assert "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR" in why_not(ExportedMemory(SIZES, driver), driver)


def test_an_allocation_that_has_more_than_the_pool_is_not_exported() -> None:
    driver = FakeDriver()
    (segment,) = ExportedMemory((3 * UNIT,), driver).segments
    part = PrivateMemory([replace(segment, nbytes=2 * UNIT)])
    assert why_not(part, driver) == (
        f"{UNIT} bytes of an allocation of {3 * UNIT} are not the pool's, and peers would see them: give the pool"
        " allocations of its own; nixl reaches it"
    )


def test_more_allocations_than_one_answer_carries_are_not_exported() -> None:
    driver = FakeDriver()
    address = driver.adjoining(ALLOCATIONS_MAX + 1)
    memory = PrivateMemory([Segment(address, (ALLOCATIONS_MAX + 1) * UNIT, MemoryKind.CUDA, 0)])
    assert f"more than {ALLOCATIONS_MAX} allocations" in why_not(memory, driver)


def test_as_many_allocations_as_one_answer_carries_are_exported() -> None:
    driver = FakeDriver()
    address, nbytes = driver.adjoining(ALLOCATIONS_MAX), ALLOCATIONS_MAX * UNIT
    rank = Rank(PrivateMemory([Segment(address, nbytes, MemoryKind.CUDA, 0)]), driver)
    with destination() as (reader, _):
        remote = reader.reach(rank.offer())
        assert remote.process is not None
        remote.process.close()
    rank.path.close()


@pytest.mark.parametrize("call", ["cuMemGetAddressRange_v2", "cuMemCreate", "cuMemMap", "cuMemcpyAsync"])
def test_where_the_driver_refuses_nothing_is_exported_and_nothing_left(call: str) -> None:
    driver = FakeDriver()
    memory = ExportedMemory(SIZES, driver)
    before = driver.left
    driver.failing[call] = "CUDA_ERROR_OUT_OF_MEMORY"
    rank = Rank(memory, driver)
    assert rank.offer().why_not == f"the driver refuses ({call}: CUDA_ERROR_OUT_OF_MEMORY); nixl may reach this memory"
    assert driver.left == before
    rank.path.close()


@pytest.mark.parametrize(
    "segments",
    [
        [Segment(1 << 20, 64)],
        [Segment(1 << 20, 64, MemoryKind.PINNED_HOST)],
        [Segment(1 << 20, 64, MemoryKind.CUDA, 0), Segment(2 << 20, 64, MemoryKind.CUDA, 1)],
        [Segment(1 << 20, 64, MemoryKind.CUDA, 0), Segment(2 << 20, 64)],
    ],
    ids=["host", "pinned", "two GPUs", "both"],
)
def test_a_rank_whose_memory_is_not_of_one_gpu_has_no_such_path(segments: list[Segment]) -> None:
    with pytest.raises(DataPathUnavailable, match="not that of one GPU"):
        CudaVmmPath(PrivateMemory(segments), FakeDriver())


def test_without_a_driver_there_is_no_such_path_and_it_says_so() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is one")
    memory, _ = plain((UNIT,))
    with pytest.raises(DataPathUnavailable, match="the driver of GPUs cannot be used"):
        CudaVmmPath(memory)


# -- what a peer may say


def test_a_gpu_that_this_process_does_not_see_is_refused() -> None:
    with source(FakeDriver([OTHER_GPU])) as rank, destination(FakeDriver([GPU])) as (reader, _):
        assert "which this process does not see" in reader.refusal(rank.offer())


def test_a_gpu_without_peer_access_is_refused() -> None:
    with source(device=1) as rank, destination(FakeDriver(reaches=False)) as (reader, _):
        assert "has no peer access to GPU-02020202" in reader.refusal(rank.offer())


ODD: dict[str, Callable[[CudaVmmEndpoint], CudaVmmEndpoint]] = {
    "no nonce": lambda part: replace(part, nonce=b""),
    "no allocations": lambda part: replace(part, allocations=()),
    "too many allocations": lambda part: replace(part, allocations=(UNIT,) * (ALLOCATIONS_MAX + 1)),
    "an empty one": lambda part: replace(part, allocations=(0, UNIT)),
    "an endless one": lambda part: replace(part, allocations=(1 << 63, UNIT)),
    "no spans": lambda part: replace(part, spans=()),
    "a span of another allocation": lambda part: replace(part, spans=(Span(2, 0, 1),)),
    "a span beyond its allocation": lambda part: replace(part, spans=(Span(1, 1, UNIT),)),
    "a span that wraps around": lambda part: replace(part, spans=(Span(1, (1 << 64) - 1, 2),)),
    "an empty span": lambda part: replace(part, spans=(Span(0, 0, 0),)),
    "spans without end": lambda part: replace(part, spans=(Span(0, 0, 1),) * ((1 << 16) + 1)),
}


@pytest.mark.parametrize("odd", ODD)
def test_a_description_that_contradicts_itself_is_refused(odd: str) -> None:
    with source() as rank, destination() as (reader, _):
        assert "contradicts itself" in reader.refusal(ODD[odd](rank.offer()))


def test_a_peer_that_offers_nothing_of_it_is_refused() -> None:
    with destination() as (reader, _):
        assert reader.refusal(None) == "the peer offers no memory of a GPU"


class Liar:
    """A peer whose process answers with other descriptors than those that it spoke of."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._socket = ProcessSocket()

    def offer(self, change: Callable[[list[int]], None]) -> CudaVmmEndpoint:
        def answer(*_: Any) -> Reply:
            exports = self._rank.path._exports
            assert exports is not None
            fds = list(exports.descriptors().fds)
            change(fds)
            return Reply(fds=tuple(fds))

        path, token = self._socket.mint("", "cuda_vmm", answer)
        return replace(self._rank.offer(), socket_path=path, token=token)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def liar() -> Iterator[Liar]:
    with source() as rank:
        made = Liar(rank)
        yield made
        made.close()


def instead(fds: list[int], index: int, made: int) -> None:
    os.close(fds[index])
    fds[index] = made


def memfd(nbytes: int) -> int:
    fd = os.memfd_create("no allocation")
    os.ftruncate(fd, nbytes)
    return fd


def end_of_pair() -> int:
    ends = socket.socketpair()
    ends[0].close()
    return ends[1].detach()


def swap(fds: list[int]) -> None:
    fds[0], fds[1] = fds[1], fds[0]


def drop(fds: list[int]) -> None:
    os.close(fds.pop())


LIES: dict[str, tuple[Callable[[list[int]], None], str]] = {
    "a socket": (lambda fds: instead(fds, 0, end_of_pair()), "cuMemImportFromShareableHandle: CUDA_ERROR_INVALID"),
    "a device": (lambda fds: instead(fds, 1, os.open("/dev/null", os.O_RDWR)), "cuMemImportFromShareableHandle"),
    "a file that may shrink": (lambda fds: instead(fds, 0, memfd(4 * UNIT)), "cuMemImportFromShareableHandle"),
    "a nonce that is none": (lambda fds: instead(fds, 2, os.open("/dev/zero", os.O_RDWR)), "cuMemImportFromShareable"),
    "a shorter allocation": (swap, "cuMemMap: CUDA_ERROR_INVALID_VALUE"),
    "other memory's nonce": (lambda fds: instead(fds, 2, os.dup(fds[0])), "other memory than the peer spoke of"),
    "too few": (drop, "sent 2 descriptors for 2 allocations and a nonce"),
    "one too many": (lambda fds: fds.append(os.dup(fds[0])), "not all of the peer's descriptors came"),
    "far too many": (lambda fds: fds.extend(os.dup(fds[0]) for _ in range(200)), "not all of the peer's descriptors"),
}


@pytest.mark.parametrize("lie", LIES)
def test_other_descriptors_than_those_spoken_of_are_refused_and_nothing_is_left(lie: str, liar: Liar) -> None:
    change, said = LIES[lie]
    with destination() as (reader, array):
        liar.offer(change)  # opens the socket
        before = open_descriptors()
        for _ in range(5):
            with pytest.raises(DataPathUnavailable) as refused:
                reach(reader.path, RankEndpoint(0, cuda_vmm=liar.offer(change)))
            assert said in refused.value.message
            assert reader.driver.left == (0, 0)
        assert (array == GUARD).all()
        until(lambda: open_descriptors() == before)  # the thread that answers closes its own, too


@pytest.mark.parametrize("call", ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess", "cuMemcpyAsync"])
def test_where_the_driver_maps_nothing_the_peer_is_refused_and_nothing_left(call: str) -> None:
    with source() as rank, destination() as (reader, _):
        part = rank.offer()
        reader.driver.failing[call] = "CUDA_ERROR_NOT_SUPPORTED"
        with pytest.raises(DataPathUnavailable) as refused:
            reach(reader.path, RankEndpoint(0, cuda_vmm=part))
        assert refused.value.message == f"the peer's descriptors cannot be mapped: {call}: CUDA_ERROR_NOT_SUPPORTED"
        assert reader.driver.left == (0, 0)


def test_a_source_whose_driver_gives_no_descriptor_says_so() -> None:
    with source() as rank, destination() as (reader, _):
        rank.driver.failing["cuMemExportToShareableHandle"] = "CUDA_ERROR_NOT_PERMITTED"
        with pytest.raises(DataPathUnavailable, match="cuMemExportToShareableHandle: CUDA_ERROR_NOT_PERMITTED"):
            reader.reach(rank.offer())


def test_each_rank_of_a_peer_is_given_the_descriptors_once_and_none_after_withdrawal() -> None:
    with source() as rank, destination() as (reader, _):
        part = rank.offer()
        remote = reader.reach(part)
        assert remote.process is not None
        remote.process.close()
        for refused in (part, rank.offer()):
            rank.path.withdraw("")
            with pytest.raises(DataPathUnavailable, match="unknown, used or expired"):
                reader.reach(refused)


# -- ends


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
