"""Tests that need a GPU: `make gpu-test`. Elsewhere they are skipped, with the reason."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.measures.devices import missing
from bench.plan import PULL_QUICK
from bench.run import run_devices
from bench.told import Told
from kvgrpc.core.values.block_ids import Ids
from kvgrpc.datapath.host.memory import PrivateMemory, use_device
from kvgrpc.engine import CopyFailed
from kvgrpc.engine.cuda import CudaDevice
from kvgrpc.engine.cuda_memory import CudaMemory
from tests.service.conftest import SETTINGS, SHARED
from tests.service.engines import SUCCEEDED, Engine, ServeProcess, blocks_for
from tests.service.pushes import finish, register, reserve
from tests.service.values import new_key, prompt

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
        assert torch.from_numpy(mirror).is_pinned()
        device.to_host(ids(0), ids(device.nbytes)).synchronize()
        device.close()
        assert not torch.from_numpy(mirror).is_pinned()
        device.close()


@pytest.mark.skipif(not WHY and torch.cuda.device_count() < 2, reason="every thread begins on the only device")
def test_a_thread_is_set_to_the_device_of_its_memory() -> None:
    last = torch.cuda.device_count() - 1
    segments = PrivateMemory.of(torch.zeros(1 << 20, dtype=torch.uint8, device=f"cuda:{last}")).segments

    def devices() -> list[int]:
        before = torch.cuda.current_device()
        use_device(segments)
        return [before, torch.cuda.current_device()]

    with ThreadPoolExecutor(1) as thread:  # a thread that has not used CUDA yet
        assert thread.submit(devices).result() == [0, last]


def test_pulls_out_of_a_device_and_into_it_bring_every_byte() -> None:
    plan = replace(PULL_QUICK, data_paths=("shm",), layouts=("scattered",))
    with Told(plan.device_steps()) as told:
        found = asyncio.run(run_devices(plan, "cuda", told))
    assert [case.direction for case in found.cases] == ["out", "in"]


def test_memory_of_a_pool_is_zeros_and_read_run_by_run() -> None:
    with closing(CudaMemory("cuda:0", 1 << 20)) as pool:
        assert pool.read([(0, 1 << 20)]) == [bytes(1 << 20)]
        mirror = np.random.default_rng(1).integers(0, 256, 1 << 20, dtype=np.uint8)
        with closing(pool.device()) as device:
            device.open(mirror)
            device.to_device(ids(0), ids(1 << 20)).synchronize()
        whole = mirror.tobytes()
        runs = [(7, 100), (1 << 19, 4096), (0, 1)]
        assert pool.read(runs) == [whole[offset : offset + nbytes] for offset, nbytes in runs]
        pool.close()
        with pytest.raises(CopyFailed, match="given back"):
            pool.read(runs)


def test_memory_of_a_pool_goes_back_to_the_device_though_a_mirror_refers_to_it() -> None:
    def free_bytes() -> int:
        return int(torch.cuda.mem_get_info(0)[0])

    nbytes = 256 << 20
    CudaMemory("cuda:0", 1).close()
    before = free_bytes()
    with closing(CudaMemory("cuda:0", nbytes)) as pool, closing(pool.device()):
        assert free_bytes() < before - nbytes // 2
        pool.close()
        assert free_bytes() > before - nbytes // 2


@pytest.mark.parametrize("data_paths", ["shm", "nixl"])
def test_pulls_and_pushes_of_servers_with_pools_on_a_device_bring_every_byte(data_paths: str, tmp_path: Path) -> None:
    """No engine writes into the device here, so its content comes from the host."""
    flags = (*SHARED, "--data-paths", data_paths)
    with ExitStack() as stack:
        engines = []
        for name, device in (("P", "host"), ("G", "cuda:0"), ("D", "host")):
            process = ServeProcess(tmp_path / name, *flags, "--device", device, settings=SETTINGS, fresh=True)
            stack.callback(process.end)
            engines.append(Engine(process))
            stack.callback(engines[-1].api.close)
        begin, on_gpu, end = engines
        tokens = prompt(40)
        blocks = [engine.allocate(blocks_for(40)) for engine in engines]
        written = begin.write(blocks[0], 1)
        pull = on_gpu.pull(begin.hand_over(tokens, blocks[0]).grant, tokens, blocks[1])
        assert on_gpu.wait(pull.transfer_id).state == SUCCEEDED
        assert on_gpu.read(blocks[1]) == written
        key = new_key()
        reserved = reserve(end, key, tokens, blocks[2])
        register(on_gpu, reserved.grant)
        finish(on_gpu, key, tokens, blocks[1])
        assert end.wait(reserved.transfer.transfer_id).state == SUCCEEDED
        assert end.read(blocks[2]) == written
