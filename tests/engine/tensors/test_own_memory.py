"""Stores in memory that their process brings, of the host or of a fake GPU. Tensors go directly from store to store.
tests/gpu has the tests that need a GPU.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvgrpc.client import connect_sync
from kvgrpc.datapath.cuda_vmm import libcuda
from kvgrpc.datapath.cuda_vmm.memory import VmmMemory
from kvgrpc.engine.tensors import TensorStore
from kvgrpc.engine.tensors.arrays import copy_in, read, room
from kvgrpc.errors import InvalidRequest, PreconditionFailed, Reason
from kvgrpc.v1 import common_pb2
from tests.datapath.cuda_vmm.fake_driver import DRIVER, view
from tests.engine.support import Asked, Workers, refused
from tests.engine.tensors.conftest import PAGE, PAGES, Launch


class DeviceTensor(torch.Tensor):
    """Memory of a fake GPU, whose kernels run on the host at once."""

    is_cuda = True
    device: Any = SimpleNamespace(type="cuda", index=0)


class Event:
    """A CUDA event whose work is already done. `waits` counts the waits for it."""

    waits = 0

    def record(self, _: object) -> None:
        """Does nothing, because all work is already done."""

    def synchronize(self) -> None:
        Event.waits += 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[VmmMemory]]:
    """Installs a fake GPU. Yields its allocations, which are freed after the test."""
    monkeypatch.setattr(libcuda, "load", lambda: DRIVER)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    before, made = DRIVER.left, list[VmmMemory]()
    yield made
    for memory in made:
        memory.free()
    assert DRIVER.left == before


def of_gpu(made: list[VmmMemory]) -> torch.Tensor:
    """Returns memory of the fake GPU for a store."""
    made.append(VmmMemory(DRIVER, 0, PAGES * PAGE))
    whole = torch.from_numpy(view(made[-1].segments[0].address, PAGES * PAGE)).zero_()
    return whole.as_subclass(DeviceTensor)


def of_host() -> torch.Tensor:
    return torch.zeros(PAGES * PAGE, dtype=torch.uint8)


@pytest.fixture
def other() -> Iterator[Asked]:
    """Yields another process, which has no store yet."""
    workers = Workers("tests.engine.tensors.store_worker")
    yield workers.make()
    workers.close()


def begun(launch: Launch, memory: torch.Tensor, *data_paths: str) -> TensorStore:
    return launch(store_bytes=0, memory=memory, data_paths=data_paths)


def paths(store: TensorStore) -> set[str]:
    """Returns the data paths of a store's transfers."""
    with connect_sync(store.address) as lead:
        rows = [path for transfer in lead.list_transfers().transfers for path in transfer.paths]
    return {common_pb2.DataPath.Name(row.data_path).removeprefix("DATA_PATH_") for row in rows}


def lies_in(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    return 0 <= tensor.data_ptr() - memory.data_ptr() < memory.numel()


@pytest.mark.parametrize("put", [True, False], ids=["put", "fetched"])
@pytest.mark.parametrize("data_path", ["nixl", "collective"])
def test_tensors_go_between_stores_in_memory_of_one_process(
    launch: Launch, key: bytes, data_path: str, put: bool
) -> None:
    memories = of_host(), of_host()
    p, d = (begun(launch, memory, data_path) for memory in memories)
    sent = torch.randn(3, 1, 700).bfloat16()
    p.put(key, "torch", sent, to=[d.address] if put else [])
    p.put(key, "numpy", np.arange(5000), to=[d.address] if put else [])
    source = {} if put else {"source": p.address}
    with d.get(key, "torch", **source) as got, d.get(key, "numpy", **source) as other:
        assert torch.equal(got.torch(), sent)
        assert lies_in(got.torch(), memories[1])
        assert (other.numpy() == np.arange(5000)).all()
    assert paths(d) == {data_path.upper()}


@pytest.mark.parametrize("put", [True, False], ids=["put", "fetched"])
@pytest.mark.parametrize("data_path", ["cma", "nixl", "collective"])
def test_tensors_go_between_stores_in_memory_of_two_processes(
    launch: Launch, key: bytes, other: Asked, data_path: str, put: bool
) -> None:
    memory = of_host()
    d = begun(launch, memory, data_path)
    source = other.ask(op="launch", data_path=data_path)
    getting = [d.get_async(key, part) for part in range(8)] if put else []
    other.send(op="put", key=key.hex(), parts=8, to=[d.address] if put else [])
    if not put:
        assert other.answer() == "put"
        getting = [d.get_async(key, part, source=source) for part in range(8)]
    for number, future in enumerate(getting):
        with future.result() as got:
            assert torch.equal(got.torch(), torch.arange(900) + number)
            assert lies_in(got.torch(), memory)
    if put:
        assert other.answer() == "put"
    assert paths(d) == {data_path.upper()}


def test_stores_in_shared_memory_and_in_memory_of_a_process_exchange_tensors(launch: Launch, key: bytes) -> None:
    shared, own = launch(), launch(store_bytes=0, memory=of_host())
    for name, source, consumer in (("there", shared, own), ("back", own, shared)):
        source.put(key, name, torch.arange(900), to=[consumer.address])
        with consumer.get(key, name) as got:
            assert torch.equal(got.torch(), torch.arange(900))
    assert (paths(own), paths(shared)) == ({"SHM"}, {"CMA"})


def test_who_waits_for_a_put_that_no_data_path_brings_hears_it_as_its_source_does(launch: Launch, key: bytes) -> None:
    """Both stores are in one process, and cma reads other processes only."""
    p, d = (begun(launch, of_host(), "cma") for _ in "pd")
    getting = [d.get_async(key, name) for name in "abc"]
    putting = [p.put_async(key, name, torch.zeros(9), to=[d.address]) for name in "abc"]
    errors = [*(future.exception() for future in getting), *(put.future.exception() for put in putting)]
    for error in errors:
        assert isinstance(error, PreconditionFailed)
        assert error.reason is Reason.NO_DATA_PATH
        assert "allow nixl or collective" in str(error)


def test_a_put_between_ipv4_and_ipv6_fails_both_sides_at_once_and_says_so(launch: Launch, key: bytes) -> None:
    """Both leads are reached, but the ranks listen at addresses from which the other one cannot connect."""
    p = begun(launch, of_host(), "collective")
    d = launch(store_bytes=0, memory=of_host(), data_paths=("collective",), listen="[::1]:0")
    waiting = d.get_async(key, "a")
    putting = p.put_async(key, "a", torch.zeros(9), to=[d.address])
    for error in (waiting.exception(), putting.future.exception()):
        assert isinstance(error, PreconditionFailed), error
        assert error.reason is Reason.NO_DATA_PATH
        assert "IPv6" in str(error)


@pytest.mark.parametrize("put", [True, False], ids=["put", "fetched"])
def test_tensors_go_from_device_to_device(gpu: list[VmmMemory], launch: Launch, key: bytes, put: bool) -> None:
    memories = of_gpu(gpu), of_gpu(gpu)
    p, d = (begun(launch, memory, "cuda_vmm") for memory in memories)
    sent, before = torch.randn(3, 1, 700), Event.waits
    p.put(key, "a", sent, to=[d.address] if put else [])
    new = p.empty((300,), "float32")
    new.torch().copy_(sent.reshape(-1)[:300])
    p.put(key, "b", new, to=[d.address] if put else [])
    source = {} if put else {"source": p.address}
    with d.get(key, "a", **source) as got, d.get(key, "b", **source) as other:
        assert torch.equal(got.torch().as_subclass(torch.Tensor), sent)
        assert torch.equal(other.torch().as_subclass(torch.Tensor), sent.reshape(-1)[:300])
        assert lies_in(got.torch(), memories[1])
        with pytest.raises(TypeError, match=r"use torch\(\)"):
            got.numpy()
    assert paths(d) == {"CUDA_VMM"}
    assert Event.waits > before, "pages are sent when the device has filled them, and given back when it has read them"
    for store in (p, d):
        store.release(key)
        store.close()


def test_a_store_on_a_device_and_one_that_nothing_reaches_from_there_say_so(
    gpu: list[VmmMemory], launch: Launch, key: bytes
) -> None:
    p, d = begun(launch, of_gpu(gpu), "cuda_vmm"), begun(launch, of_host(), "cma")
    waiting = d.get_async(key, "a")
    with refused(Reason.NO_DATA_PATH, PreconditionFailed):
        p.put(key, "a", torch.zeros(9), to=[d.address])
    p.put(key, "b", torch.zeros(9))
    for asked in (waiting, d.get_async(key, "b", source=p.address)):
        with refused(Reason.NO_DATA_PATH, PreconditionFailed):
            asked.result()
    for store in (p, d):
        store.close()


@pytest.mark.parametrize(
    "memory",
    [
        torch.zeros(PAGE, dtype=torch.int8),
        torch.zeros(2, PAGE, dtype=torch.uint8),
        of_host()[: PAGE - 1],
        torch.zeros(PAGE, dtype=torch.uint8, device="meta"),
    ],
    ids=["no bytes", "two dimensions", "no page", "no device"],
)
def test_memory_that_is_no_store_is_refused(launch: Launch, memory: torch.Tensor) -> None:
    with pytest.raises(InvalidRequest):
        begun(launch, memory, "cma")
    with pytest.raises(InvalidRequest, match="store_bytes"):
        launch(memory=of_host())


@pytest.mark.parametrize("data_paths", [("shm",), ("shm", "cuda_vmm"), ()], ids=str)
def test_memory_of_the_host_that_no_data_path_reaches_is_refused(launch: Launch, data_paths: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest, match="reached by cma, nixl, collective"):
        begun(launch, of_host(), *data_paths)


@pytest.mark.parametrize("data_paths", [("shm", "cma"), ()], ids=str)
def test_memory_of_a_gpu_that_no_data_path_reaches_is_refused(
    gpu: list[VmmMemory], launch: Launch, data_paths: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidRequest, match="reached by nixl, cuda_vmm, collective"):
        begun(launch, of_gpu(gpu), *data_paths)


@pytest.mark.parametrize(
    "tensor", [torch.arange(900), np.arange(900), np.arange(1800)[::2]], ids=["torch", "numpy", "gaps"]
)
def test_pages_that_do_not_lie_side_by_side_are_filled_and_read_all_the_same(tensor: Any) -> None:
    memory = torch.zeros(8 * 4096, dtype=torch.uint8)
    copy_in(tensor, memory, [1, 5], 4096)
    assert memory[2 * 4096 : 5 * 4096].count_nonzero() == 0
    data, is_view = read(memory, [1, 5], 4096, tensor.nbytes)
    assert not is_view
    assert isinstance(data, torch.Tensor)
    assert bytes(data.numpy()) == np.ascontiguousarray(tensor).tobytes()
    place, is_view = room(memory, [2, 3], 4096, 5000)
    assert is_view
    assert lies_in(torch.as_tensor(place), memory)
