"""Named tensors of a GPU: a put takes what the device had computed, whatever is queued after it."""

import os
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from bench.measures.devices import missing
from kvgrpc.engine.cuda_memory import CudaMemory
from kvgrpc.engine.tensors import TensorStore

WHY = missing("cuda")
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY or "there is one")


def test_a_tensor_is_copied_when_what_computes_it_is_done_and_before_it_is_said_to_be_saved() -> None:
    key = os.urandom(16)
    with TensorStore.launch(store_bytes=64 << 20) as p, TensorStore.launch(store_bytes=64 << 20) as d:
        matrix = torch.randn(4096, 4096, device="cuda:0")
        for _ in range(50):
            matrix = torch.nn.functional.normalize(matrix @ matrix)
        last = matrix[:1024].clone()
        expected = last.clone()
        pending = p.put_async(key, "a", last, to=[d.address])
        p.wait_for_saved()
        last.zero_()
        pending.result(60.0)
        with d.get(key, "a", dtype="float32", shape=(1024, 4096)) as got:
            assert torch.equal(got.torch(), expected.cpu())


def test_memory_of_a_loaded_tensor_is_not_reused_before_the_stream_that_computes_has_read_it() -> None:
    pytest.importorskip("vllm")
    from kvgrpc.integrations.vllm.tensors.stacks import Stack

    cuda: Any = torch.cuda  # untyped in part
    cache = torch.zeros(8, 1 << 20, dtype=torch.uint8, device="cuda:0")
    made = torch.ones(1, 2, 1 << 20, dtype=torch.uint8, device="cuda:0")
    at, shape, computes = made.data_ptr(), made.shape, cuda.Stream()
    cuda.synchronize()
    with cuda.stream(computes):
        Stack(0, ("0",)).scatter({"0": cache}, [3, 5], made[:, :])
        cuda._sleep(1 << 30)  # stands for copies that are still queued
    del made
    assert torch.empty(shape, dtype=torch.uint8, device="cuda:0").data_ptr() != at
    computes.synchronize()
    assert torch.all(cache[[3, 5]] == 1)


@pytest.mark.parametrize("put", [True, False], ids=["put", "fetched"])
def test_tensors_go_from_device_to_device(put: bool) -> None:
    key, sent = os.urandom(16), torch.randn(1024, 1024, device="cuda:0")
    made = [CudaMemory("cuda:0", 64 << 20, exported=True) for _ in range(2)]
    with ExitStack() as stack:
        for memory in made:
            stack.callback(memory.close)
        p, d = (
            stack.enter_context(TensorStore.launch(memory=memory.tensor, data_paths=("cuda_vmm",))) for memory in made
        )
        p.put(key, "a", sent, to=[d.address] if put else [])
        with d.get(key, "a", **({} if put else {"source": p.address})) as got:
            assert got.torch().device == sent.device
            assert torch.equal(got.torch(), sent)
