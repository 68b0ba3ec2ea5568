"""Peers that describe their GPU memory falsely, or send other descriptors: nothing of theirs stays mapped."""

import fcntl
import gc
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvgrpc.core.values.endpoints import SPANS_MAX, AllocationSpan, CudaVmmEndpoint, RankEndpoint
from kvgrpc.datapath.base import DataPathUnavailable
from kvgrpc.datapath.cuda_vmm.driver import DriverError
from kvgrpc.datapath.cuda_vmm.exports import ALLOCATIONS_MAX
from kvgrpc.datapath.host.process_socket import ProcessSocket, SocketReply
from tests.datapath.cuda_vmm.fake_driver import GPU, OTHER_GPU, UNIT, FakeDriver, plain
from tests.datapath.cuda_vmm.ranks import NBYTES, SIZES, Rank, destination, source
from tests.datapath.movers import until
from tests.datapath.peers import (
    GUARD,
    open_descriptors,
    reach,
)


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
    "a span of another allocation": lambda part: replace(part, spans=(AllocationSpan(2, 0, 1),)),
    "a span beyond its allocation": lambda part: replace(part, spans=(AllocationSpan(1, 1, UNIT),)),
    "a span that wraps around": lambda part: replace(part, spans=(AllocationSpan(1, (1 << 64) - 1, 2),)),
    "an empty span": lambda part: replace(part, spans=(AllocationSpan(0, 0, 0),)),
    "spans without end": lambda part: replace(part, spans=(AllocationSpan(0, 0, 1),) * (SPANS_MAX + 1)),
}


@pytest.mark.parametrize("odd", ODD)
def test_a_description_that_contradicts_itself_is_refused(odd: str) -> None:
    with source() as rank, destination() as (reader, _):
        assert "contradicts itself" in reader.refusal(ODD[odd](rank.offer()))


def test_a_peer_that_offers_nothing_of_it_is_refused() -> None:
    with destination() as (reader, _):
        assert reader.refusal(None) == "the peer offers no memory of a GPU"


class Liar:
    """A peer whose process answers with other descriptors than those that it described."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._socket = ProcessSocket()

    def offer(self, change: Callable[[list[int]], None]) -> CudaVmmEndpoint:
        def answer(*_: Any) -> SocketReply:
            exports = self._rank.path._exports
            assert exports is not None
            fds = list(exports.descriptors().fds)
            change(fds)
            return SocketReply(fds=tuple(fds))

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


def sealed(name: str) -> int:
    """Makes a memfd like an allocation of some driver, on that device or on none."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4 * UNIT)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def end_of_pair() -> int:
    ends = socket.socketpair()
    ends[0].close()
    return ends[1].detach()


def swap(fds: list[int]) -> None:
    fds[0], fds[1] = fds[1], fds[0]


def drop(fds: list[int]) -> None:
    os.close(fds.pop())


NOT_THERE = f"a descriptor of memory that is not of GPU-{'01' * 4}-0101-0101-0101-{'01' * 6}, as the peer says"
LIES: dict[str, tuple[Callable[[list[int]], None], str]] = {
    "a socket": (lambda fds: instead(fds, 0, end_of_pair()), "cuMemImportFromShareableHandle: CUDA_ERROR_INVALID"),
    "a device": (lambda fds: instead(fds, 1, os.open("/dev/null", os.O_RDWR)), "cuMemImportFromShareableHandle"),
    "a file that may shrink": (lambda fds: instead(fds, 0, memfd(4 * UNIT)), "cuMemImportFromShareableHandle"),
    "a nonce that is none": (lambda fds: instead(fds, 2, os.open("/dev/zero", os.O_RDWR)), "cuMemImportFromShareable"),
    "memory of the host": (lambda fds: instead(fds, 0, sealed("host")), NOT_THERE),
    "another GPU's memory": (lambda fds: instead(fds, 1, sealed(f"device-{OTHER_GPU.hex()}")), NOT_THERE),
    "another GPU's nonce": (lambda fds: instead(fds, 2, sealed(f"device-{OTHER_GPU.hex()}")), NOT_THERE),
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
        with pytest.raises(DataPathUnavailable):  # the answering thread has then opened what it needs
            reach(reader.path, RankEndpoint(0, cuda_vmm=liar.offer(change)))
        gc.collect()  # frees objects of earlier tests
        before = open_descriptors()
        for _ in range(8):
            with pytest.raises(DataPathUnavailable) as refused:
                reach(reader.path, RankEndpoint(0, cuda_vmm=liar.offer(change)))
            assert said in refused.value.message
            assert reader.driver.left == (0, 0)
        assert (array == GUARD).all()
        until(lambda: open_descriptors() <= before)  # the answering thread closes its descriptor too


@pytest.mark.parametrize(
    "call",
    [
        "cuMemGetAllocationGranularity",
        "cuMemImportFromShareableHandle",
        "cuMemGetAllocationPropertiesFromHandle",
        "cuMemMap",
        "cuMemSetAccess",
        "cuStreamCreate",
    ],
)
def test_where_the_driver_maps_nothing_the_peer_is_refused_and_nothing_left(call: str) -> None:
    with source() as rank, destination() as (reader, _):
        part = rank.offer()
        reader.driver.failing[call] = "CUDA_ERROR_NOT_SUPPORTED"
        said = reader.refusal(part)
        assert said == f"the peer's descriptors cannot be mapped: {call}: CUDA_ERROR_NOT_SUPPORTED"


@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuEventSynchronize"])
def test_what_the_reading_of_a_nonce_may_still_use_stays_when_it_was_lost(call: str) -> None:
    with source() as rank:
        memory, _ = plain((NBYTES,))
        reader = Rank(memory, FakeDriver())
        part = rank.offer()
        reader.driver.held = []
        reader.driver.failing[call] = "CUDA_ERROR_UNKNOWN"
        with pytest.raises(DataPathUnavailable, match=f"cannot be mapped: {call}: CUDA_ERROR_UNKNOWN"):
            reader.reach(part)
        reader.path.close()
        gc.collect()
        assert reader.driver.left == (0, 1)
        for copies in reader.driver.held:
            copies.run()


def test_a_mapping_that_cannot_be_undone_keeps_no_other_one_and_nothing_of_other_peers() -> None:
    with source() as rank, source() as other:
        memory, _ = plain((NBYTES,))
        reader = Rank(memory, FakeDriver())
        for peer in (rank, other):
            remote = reader.reach(peer.offer())
            assert remote.process is not None
            remote.process.close()
        assert reader.driver.left == (0, 2 * len(SIZES))
        reader.driver.failing_next["cuMemUnmap"] = "CUDA_ERROR_UNKNOWN"
        with pytest.raises(DriverError, match="cuMemUnmap"):
            reader.path.close()
        assert reader.driver.left == (0, 1)
        reader.path.close()


def test_a_handle_that_cannot_be_released_leaves_no_mapping() -> None:
    with source() as rank:
        memory, _ = plain((NBYTES,))
        reader = Rank(memory, FakeDriver())
        part = rank.offer()
        reader.driver.failing_next["cuMemRelease"] = "CUDA_ERROR_UNKNOWN"
        with pytest.raises(DataPathUnavailable, match="cannot be mapped: cuMemRelease"):
            reader.reach(part)
        assert reader.driver.left == (1, 0)
        reader.path.close()


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
