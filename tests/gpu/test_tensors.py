"""Named tensors of a GPU: what is put is what the device had computed, whatever is queued after it."""

import os

import pytest
import torch

from kvgrpc.bench.measures.devices import missing
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
