"""The torch tensors of a CUDA device: which bytes a copy is of, on a processor; and all of it where there is a GPU."""

import numpy as np
import pytest
import torch

from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.engine.cuda import CudaDevice, bytes_of, pairs
from kvgrpc.errors import InvalidRequest, Reason
from tests.engine.support import refused

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_a_dense_tensor_is_its_bytes_in_the_order_of_its_memory() -> None:
    base = torch.arange(1, 61, dtype=torch.int16)
    tensor = base[12:36].view(2, 3, 4).permute(2, 0, 1)
    (segment,) = PrivateMemory.of(tensor).segments
    found = bytes_of(tensor, segment)
    assert found.numpy().tobytes() == base[12:36].numpy().tobytes()
    found[0] = 77
    assert base[12] == 77


def test_runs_are_cut_where_a_tensor_ends() -> None:
    tensors = [torch.arange(first, first + size, dtype=torch.uint8) for first, size in ((0, 8), (8, 16), (24, 8))]
    host = torch.zeros(32, dtype=torch.uint8)
    for there, here in pairs(host, tensors, np.cumsum([8, 16, 8]), ids(2, 7), ids(4, 20)):
        there.copy_(here)
    expected = [i if 2 <= i < 6 or 7 <= i < 27 else 0 for i in range(32)]
    assert host.tolist() == expected


def test_tensors_of_a_processor_are_refused() -> None:
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        CudaDevice([torch.zeros(8, dtype=torch.uint8)])


@NO_GPU
def test_a_gpu_copies_both_ways_beside_what_it_computes() -> None:
    tensors = [torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device="cuda") for _ in range(3)]
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
