"""Memory of GPUs of which there are descriptors, or why there are none."""

import queue
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvgrpc.core.events import PeerMapped
from kvgrpc.core.values.endpoints import CudaVmmEndpoint, MemoryKind, RankEndpoint, Segment
from kvgrpc.datapath.base import DataPathUnavailable
from kvgrpc.datapath.cuda_vmm.exports import ALLOCATIONS_MAX
from kvgrpc.datapath.cuda_vmm.path import CudaVmmPath
from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.datapath.mover import Mover
from kvgrpc.datapath.reports import Report
from tests.datapath.cuda_vmm.fake_driver import UNIT, ExportedMemory, FakeDriver, plain
from tests.datapath.cuda_vmm.ranks import SIZES, Rank, destination, source
from tests.datapath.movers import Held
from tests.datapath.peers import DEADLINE_S


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


def test_the_next_data_path_is_taken_and_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    why = "memory of cudaMalloc cannot be exported as descriptors; nixl reaches it"
    memory, _ = plain((UNIT,))
    reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
    mover = Mover(0, memory, [CudaVmmPath(memory, FakeDriver()), Held()], reports.put)
    mover.start()
    mover.connect("peer", RankEndpoint(0, cuda_vmm=CudaVmmEndpoint(why_not=why)), ["cuda_vmm", "held"])
    mapped = reports.get(timeout=DEADLINE_S)
    assert isinstance(mapped, PeerMapped)
    assert mapped.data_path == "held"
    assert mapped.rejected == (("cuda_vmm", f"the peer offers nothing: {why}"),)
    assert mover.close(0.0)
