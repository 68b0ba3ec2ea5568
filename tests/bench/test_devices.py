"""`python -m bench pull --device` measures both directions, here with a fake device, and skips without a GPU."""

import asyncio
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from typer.testing import CliRunner

from bench.command import bench
from bench.measures import devices
from bench.plan import PULL_QUICK
from bench.results.devices import DEVICE_BASELINES, DeviceResult
from bench.run import run_devices
from bench.stages import devices as stage
from bench.stages.devices import DeviceEngines
from bench.told import Told
from kvgrpc.core.values.block_ids import Ids
from kvgrpc.datapath.cuda_vmm import libcuda
from kvgrpc.datapath.cuda_vmm.memory import VmmMemory
from kvgrpc.datapath.mirror.lane import CopyLane
from kvgrpc.engine import Device
from kvgrpc.errors import InternalError
from tests.datapath.cuda_vmm.fake_driver import DRIVER, FakeDriver, view
from tests.engine.torch_of_the_host import OfTheHost

CASE = PULL_QUICK.cases("shm", 16 << 10)[0]


class Array:
    """A fake device: memory of this process, copied at once."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.nbytes = memory.nbytes
        self._memory = memory
        self._mirror = memory[:0]

    def open(self, mirror: NDArray[np.uint8]) -> None:
        self._mirror = mirror

    def to_host(self, offsets: Ids, nbytes: Ids) -> "Array":
        return self._copy(self._mirror, self._memory, offsets, nbytes)

    def to_device(self, offsets: Ids, nbytes: Ids) -> "Array":
        return self._copy(self._memory, self._mirror, offsets, nbytes)

    def close(self) -> None:
        self._mirror = self._memory[:0]

    def synchronize(self) -> None:
        """Does nothing: every copy has ended."""

    def _copy(self, into: NDArray[np.uint8], of: NDArray[np.uint8], offsets: Ids, nbytes: Ids) -> "Array":
        for at, count in zip(offsets.tolist(), nbytes.tolist(), strict=True):
            into[at : at + count] = of[at : at + count]
        return self


class Refusing(Array):
    """A fake device that refuses the mirror."""

    def open(self, mirror: NDArray[np.uint8]) -> None:
        raise RuntimeError("no such device")


class Held(Array):
    """A fake device whose copies end when the test lets them."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        super().__init__(memory)
        self.over = threading.Event()
        self.closed = False

    def synchronize(self) -> None:
        assert self.over.wait(30.0)

    def close(self) -> None:
        assert self.over.is_set(), "a copy is under way"
        self.closed = True


def children() -> set[str]:
    """Returns the ids of this process's children."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {child for task in tasks for child in task.read_text().split()}


def arrays(nbytes: int) -> tuple[Device, Device]:
    memory = np.zeros(nbytes, dtype=np.uint8)
    return Array(memory), Array(memory)


@pytest.mark.timeout(180)
def test_both_directions_are_measured_beside_the_copies_alone() -> None:
    plan = replace(PULL_QUICK, data_paths=("shm",), layouts=("scattered",))
    with Told(plan.device_steps()) as told:
        found = asyncio.run(run_devices(plan, "arrays", told, arrays))
        assert told.begun == plan.device_steps()
    rows = [(case.direction, case.datapath, case.blocks, case.block_bytes) for case in found.cases]
    assert rows == [(direction, "shm", 256, 16 << 10) for direction in ("out", "in")]
    assert all(case.gbps > 0 and case.copy_gbps > 0 and case.ratio_copies > 0 for case in found.cases)
    shown = found.to_json()
    assert (shown["device"], shown["quick"], len(shown["cases"])) == ("arrays", True, 2)


@pytest.mark.timeout(60)
def test_engines_of_a_device_that_refuses_are_closed() -> None:
    before = children()
    with pytest.raises(RuntimeError, match="no such device"):
        DeviceEngines(CASE, lambda nbytes: (arrays(nbytes)[0], Refusing(np.zeros(nbytes, dtype=np.uint8))), out=True)
    assert children() == before


@pytest.mark.timeout(60)
def test_a_device_is_closed_when_its_copies_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Held] = []

    def make(nbytes: int) -> tuple[Device, Device]:
        made.append(Held(np.zeros(nbytes, dtype=np.uint8)))
        return arrays(nbytes)[0], made[0]

    at_rest = CopyLane.at_rest

    def let_go(lane: CopyLane, wait_s: float) -> bool:
        made[0].over.set()
        return at_rest(lane, wait_s)

    monkeypatch.setattr(stage, "_COPY_S", 0.01)
    monkeypatch.setattr(CopyLane, "at_rest", let_go)
    with DeviceEngines(CASE, make, out=True) as engines, pytest.raises(InternalError, match="it does not end"):
        engines.copy_s()
    assert made[0].closed


def test_without_a_gpu_it_says_so_and_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "missing", lambda _: "there is none")
    result = CliRunner().invoke(bench, ["pull", "--device", "cuda", "--quick"])
    assert (result.exit_code, result.output) == (0, "SKIP: there is none\n")


def test_another_device_is_an_option_that_is_not_usable() -> None:
    result = CliRunner().invoke(bench, ["pull", "--device", "tpu"])
    assert result.exit_code == 2
    assert "choose from host, cuda" in result.output


class Tensor:
    """Memory of a fake GPU, as an engine has it."""

    is_cuda, device = True, SimpleNamespace(type="cuda", index=0)

    def __init__(self, nbytes: int) -> None:
        self.memory = VmmMemory(DRIVER, 0, nbytes)
        self.shape = (nbytes,)

    def stride(self) -> tuple[int, ...]:
        return (1,)

    def numel(self) -> int:
        return self.shape[0]

    def element_size(self) -> int:
        return 1

    def data_ptr(self) -> int:
        return self.memory.segments[0].address


class Exported:
    """A pool in that memory."""

    driver = DRIVER

    def __init__(self, nbytes: int) -> None:
        self.tensor = Tensor(nbytes)
        self._bytes = view(self.tensor.data_ptr(), nbytes)

    def write(self, whole: NDArray[np.uint8]) -> None:
        self._bytes[:] = whole

    def read(self) -> NDArray[np.uint8]:
        return self._bytes.copy()

    def close(self) -> None:
        self.tensor.memory.free()


@pytest.mark.timeout(180)
def test_pulls_between_engines_on_one_device_are_measured_beside_the_copies_of_its_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(libcuda, "load", lambda: DRIVER)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    before = DRIVER.left
    plan = replace(PULL_QUICK, data_paths=("cuda_vmm",), layouts=("scattered",))
    found = DeviceResult(plan.quick, plan.repeats, {}, {}, DEVICE_BASELINES, "a driver of none")
    with Told(plan.device_steps()) as told:
        devices.measure(plan, found, arrays, told, Exported)
        assert told.begun == plan.device_steps()
    (case,) = found.cases
    assert (case.direction, case.datapath, case.blocks, case.block_bytes) == ("between", "cuda_vmm", 256, 16 << 10)
    assert case.gbps > 0
    assert case.copy_gbps > 0
    assert DRIVER.left == before


def test_a_driver_without_such_memory_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    driver.failing["cuMemCreate"] = "CUDA_ERROR_NOT_SUPPORTED"
    monkeypatch.setattr(libcuda, "load", lambda: driver)
    monkeypatch.setitem(sys.modules, "torch", OfTheHost())
    with pytest.raises(InternalError, match="no memory of which peers get descriptors"):
        devices.cuda_pool(4096)
    driver.failing.clear()
    pool = devices.cuda_pool(4096)
    assert pool.driver is driver
    assert driver.left == (1, 1)
    pool.close()
    assert driver.left == (0, 0)


def test_memory_of_a_gpu_is_no_data_path_of_host_memory() -> None:
    result = CliRunner().invoke(bench, ["pull", "--data-paths", "cuda_vmm"])
    assert result.exit_code == 2
    assert "--data-paths" in result.output
