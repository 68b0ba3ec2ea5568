"""Copies of a CUDA device's tensors cover the right bytes. tests/gpu has the tests that need a GPU."""

import numpy as np
import torch

from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.engine.cuda import CudaDevice, bytes_of, pairs
from kvgrpc.errors import InvalidRequest, Reason
from tests.engine.support import refused


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
