"""GPU memory that has descriptors, or a reason why it has none."""

import gc
import queue
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvgrpc.core.events import PeerMapped
from kvgrpc.core.values.endpoints import SPANS_MAX, CudaVmmEndpoint, MemoryKind, RankEndpoint, Segment
from kvgrpc.datapath.base import DataPathUnavailable
from kvgrpc.datapath.cuda_vmm.driver import DriverError, Found
from kvgrpc.datapath.cuda_vmm.exports import ALLOCATIONS_MAX
from kvgrpc.datapath.cuda_vmm.memory import VmmMemory
from kvgrpc.datapath.cuda_vmm.path import CudaVmmPath
from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.datapath.mover import Mover
from kvgrpc.datapath.reports import Report
from tests.datapath.cuda_vmm.fake_driver import UNIT, ExportedMemory, FakeDriver, plain
from tests.datapath.cuda_vmm.ranks import SIZES, Rank, destination, source
from tests.datapath.movers import Held
from tests.datapath.peers import DEADLINE_S


def why_not(memory: PrivateMemory, driver: FakeDriver) -> str:
    """Returns the reason that a rank of that memory tells its peers and its log; the rank still reads theirs."""
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
    assert why_not(memory, FakeDriver()) == (
        "memory of cudaMalloc cannot be exported as descriptors; nixl may reach it"
    )


def test_an_allocation_without_a_handle_type_of_descriptors_is_not_exported() -> None:
    driver = FakeDriver()
    driver.exports = False
    assert "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR" in why_not(ExportedMemory(SIZES, driver), driver)


def test_an_allocation_that_has_more_than_the_pool_is_not_exported() -> None:
    driver = FakeDriver()
    memory = ExportedMemory((3 * UNIT,), driver)
    (segment,) = memory.segments
    part = PrivateMemory([replace(segment, nbytes=2 * UNIT)], owners=memory)
    assert why_not(part, driver) == (
        f"{UNIT} bytes of an allocation of {3 * UNIT} are not the pool's, and peers would see them: give the pool"
        " allocations of its own; nixl may reach it"
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


@pytest.mark.parametrize(
    "call",
    [
        "cuMemGetAddressRange_v2",
        "cuMemGetAllocationGranularity",
        "cuMemCreate",
        "cuMemMap",
        "cuStreamCreate",
    ],
)
def test_where_the_driver_refuses_nothing_is_exported_and_nothing_left(call: str) -> None:
    driver = FakeDriver()
    memory = ExportedMemory(SIZES, driver)
    before = driver.left
    driver.failing[call] = "CUDA_ERROR_OUT_OF_MEMORY"
    rank = Rank(memory, driver)
    assert rank.offer().why_not == f"the driver refuses ({call}: CUDA_ERROR_OUT_OF_MEMORY); nixl may reach this memory"
    assert driver.left == before
    rank.path.close()


@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuEventSynchronize"])
def test_what_a_copy_of_the_nonce_may_still_use_stays_when_it_was_lost(call: str) -> None:
    driver = FakeDriver()
    memory = ExportedMemory(SIZES, driver)
    handles, mappings = driver.left
    driver.held = []
    driver.failing[call] = "CUDA_ERROR_UNKNOWN"
    rank = Rank(memory, driver)
    assert rank.offer().why_not == f"the driver refuses ({call}: CUDA_ERROR_UNKNOWN); nixl may reach this memory"
    rank.path.close()
    gc.collect()
    assert driver.left == (handles + 1, mappings + 1)
    for copies in driver.held:
        copies.run()


def test_a_page_that_the_driver_does_not_know_again_leaves_nothing() -> None:
    driver = FakeDriver()
    memory = ExportedMemory(SIZES, driver)
    before, found = driver.left, []
    find = driver.find

    def forgets(device: int, address: int) -> Found | None:
        known = find(device, address)
        found.append(known)
        return known if len(found) <= len(SIZES) or known is None else replace(known, exports=False)

    driver.find = forgets  # type: ignore[method-assign]
    rank = Rank(memory, driver)
    assert rank.offer().why_not == "the driver does not know again what it allocated"
    assert len(found) == len(SIZES) + 1
    assert driver.left == before
    for known in found:  # only the maker's reference is left
        assert known is not None
        assert driver.references(known.handle) == (1 if known is not found[-1] else 0)
    rank.path.close()


@pytest.mark.parametrize("call", ["cuMemRelease", "cuMemUnmap"])
def test_a_call_that_fails_at_the_end_keeps_nothing_else(call: str) -> None:
    driver = FakeDriver()
    memory = ExportedMemory(SIZES, driver)
    rank = Rank(memory, driver)
    driver.failing_next[call] = "CUDA_ERROR_UNKNOWN"
    with pytest.raises(DriverError, match=call):
        rank.path.close()
    rank.path.close()
    memory.close()
    handles, mappings = driver.left
    assert (handles, mappings) == ((1, 0) if call == "cuMemRelease" else (0, 1))


def test_memory_whose_mapping_cannot_be_undone_is_released_all_the_same() -> None:
    driver = FakeDriver()
    memory = VmmMemory(driver, 0, UNIT)
    driver.failing_next["cuMemUnmap"] = "CUDA_ERROR_UNKNOWN"
    with pytest.raises(DriverError, match="cuMemUnmap"):
        memory.free()
    memory.free()
    assert driver.left == (0, 1)


def test_bytes_that_are_named_twice_hide_no_others() -> None:
    driver = FakeDriver()
    memory = ExportedMemory((2 * UNIT,), driver)
    (segment,) = memory.segments
    half = replace(segment, nbytes=UNIT)
    twice = PrivateMemory([half, half], owners=memory)
    assert why_not(twice, driver) == "segments of this memory overlap: name each byte once; nixl may reach it"


def test_a_range_that_is_not_one_allocation_is_not_exported() -> None:
    driver = FakeDriver()
    driver.whole = False
    assert why_not(ExportedMemory(SIZES, driver), driver) == (
        "the driver takes a range of several allocations for one: map each apart from the others; nixl may reach it"
    )


def test_more_segments_than_a_handshake_carries_are_not_exported() -> None:
    driver = FakeDriver()
    memory = ExportedMemory((UNIT,), driver)
    (segment,) = memory.segments

    def cut(count: int) -> PrivateMemory:
        return PrivateMemory(
            [replace(segment, address=segment.address + i, nbytes=1) for i in range(count)], owners=memory
        )

    assert why_not(cut(SPANS_MAX + 1), driver) == (
        f"this memory consists of more than {SPANS_MAX} spans, which is what a handshake carries: bring it in fewer"
        " tensors"
    )
    rank = Rank(cut(SPANS_MAX), driver)
    assert len(rank.offer().spans) == SPANS_MAX
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
    why = "memory of cudaMalloc cannot be exported as descriptors; nixl may reach it"
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
