"""What needs a GPU: `make gpu-test`. Elsewhere it is skipped, with its reason."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvgrpc.bench.measures.devices import missing
from kvgrpc.bench.plan import PULL_QUICK
from kvgrpc.bench.run import run_devices
from kvgrpc.core.values.descriptors import Ids
from kvgrpc.datapath.host.memory import PrivateMemory, use_device
from kvgrpc.engine.cuda import CudaDevice

WHY = missing("cuda")
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY or "there is one")


def ids(*values: int) -> Ids:
    return np.array(values, dtype=np.int64)


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    return [torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device="cuda:0") for _ in range(3)]


def test_copies_of_a_device_are_exact_both_ways(tensors: list[torch.Tensor]) -> None:
    device, before = CudaDevice(tensors), [tensor.cpu() for tensor in tensors]
    mirror = np.zeros(device.nbytes, dtype=np.uint8)
    device.open(mirror)
    device.to_host(ids(0), ids(device.nbytes)).synchronize()
    assert np.array_equal(mirror, torch.cat(before).numpy())
    mirror[:] = 255 - mirror
    device.to_device(ids(1 << 19), ids(1 << 21)).synchronize()
    device.close()
    after = torch.cat([tensor.cpu() for tensor in tensors]).numpy()
    changed = np.zeros(device.nbytes, dtype=bool)
    changed[1 << 19 : (1 << 19) + (1 << 21)] = True
    expected = np.where(changed, mirror, torch.cat(before).numpy())
    assert np.array_equal(after, expected)


def test_a_mirror_is_page_locked_once_and_let_go(tensors: list[torch.Tensor]) -> None:
    device = CudaDevice(tensors)
    for _ in range(2):
        mirror = np.zeros(device.nbytes, dtype=np.uint8)
        device.open(mirror)
        device.to_host(ids(0), ids(device.nbytes)).synchronize()
        device.close()
        device.close()


def test_a_thread_is_set_to_the_device_of_its_memory(tensors: list[torch.Tensor]) -> None:
    use_device(PrivateMemory.of(*tensors).segments)
    assert torch.cuda.current_device() == 0


def test_pulls_out_of_a_device_and_into_it_bring_every_byte() -> None:
    plan = replace(PULL_QUICK, data_paths=("shm",), layouts=("scattered",))
    found = asyncio.run(run_devices(plan, "cuda", lambda _: None))
    assert [case.direction for case in found.cases] == ["out", "in"]
