"""A process group of NCCL between two devices: NCCL cannot have two ranks on one device."""

from functools import partial

import pytest
import torch

from bench.measures.devices import missing
from kvgrpc.datapath.base import PostingState
from kvgrpc.datapath.collective.nccl import NcclGroup
from kvgrpc.datapath.collective.rendezvous import Rendezvous
from kvgrpc.datapath.host.memory import PrivateMemory
from tests.datapath.halves import Half, Halves
from tests.datapath.peers import runs_of

WHY = missing("cuda") or ("" if torch.cuda.device_count() > 1 else "it needs two CUDA devices")
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY or "there are two")
NBYTES = 8 << 20
SCATTERED = runs_of((0, 100, 64), (1 << 20, 4096, 2 << 20), (5_000_000, 0, 99))


def made(device: int, rendezvous: Rendezvous) -> NcclGroup:
    return NcclGroup(sends=device == 0, device=device, rendezvous=rendezvous)


def test_runs_of_a_device_arrive_on_another_one_and_nothing_else_changes() -> None:
    tensors = [torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, device=f"cuda:{number}") for number in range(2)]
    sent, expected = (tensor.cpu() for tensor in tensors)
    for at, to, nbytes in zip(SCATTERED.src, SCATTERED.dst, SCATTERED.nbytes, strict=True):
        expected[to : to + nbytes] = sent[at : at + nbytes]
    halves = Halves(
        *(
            Half(partial(made, number), PrivateMemory.of(tensor).segments, sends=number == 0)
            for number, tensor in enumerate(tensors)
        )
    )
    try:
        halves.meet()
        jobs = halves.move(SCATTERED)
        assert [(job.poll(), job.error) for job in jobs] == [(PostingState.DONE, "")] * 2
        assert torch.equal(tensors[1].cpu(), expected)
    finally:
        halves.close()
