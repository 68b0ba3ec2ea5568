"""A process group of NCCL between two devices. It needs two: NCCL has no two ranks on one."""

import threading

import pytest
import torch

from kvgrpc.bench.measures.devices import missing
from kvgrpc.core.values.sends import Values
from kvgrpc.datapath.base import PostingState
from kvgrpc.datapath.collective.group import Group, Job
from kvgrpc.datapath.collective.messages import messages
from kvgrpc.datapath.collective.nccl import NcclGroup
from kvgrpc.datapath.host.memory import PrivateMemory
from tests.datapath.peers import DEADLINE_S, runs_of
from tests.datapath.pumped import LONG_S

WHY = missing("cuda") or ("" if torch.cuda.device_count() > 1 else "it needs two CUDA devices")
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY or "there are two")
NBYTES = 8 << 20
SCATTERED = runs_of((0, 100, 64), (1 << 20, 4096, 2 << 20), (5_000_000, 0, 99))


class Side:
    """A rank's half of a group, on a device of its own."""

    def __init__(self, number: int) -> None:
        self.sends = number == 0
        self.tensor = torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, device=f"cuda:{number}")
        torch.cuda.synchronize(number)
        self.values: Values = ()
        self.told, self.made, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.group = Group(
            lambda rendezvous: NcclGroup(sends=self.sends, device=number, rendezvous=rendezvous),
            told=self._tell,
            ready=self.made.set,
        )

    def _tell(self, values: Values) -> None:
        self.values = values
        self.told.set()

    def move(self) -> Job:
        own = PrivateMemory.of(self.tensor).segments
        job = Job(messages(SCATTERED, own, sends=self.sends), self.ended.set)
        self.group.start(1, job)
        return job


def test_runs_of_a_device_arrive_on_another_one_and_nothing_else_changes() -> None:
    sides = source, destination = Side(0), Side(1)
    expected, sent = destination.tensor.cpu(), source.tensor.cpu()
    for at, to, nbytes in zip(SCATTERED.src, SCATTERED.dst, SCATTERED.nbytes, strict=True):
        expected[to : to + nbytes] = sent[at : at + nbytes]
    for side, other in (sides, sides[::-1]):
        assert side.told.wait(LONG_S)
        other.group.learn(side.values)
    assert all(side.made.wait(LONG_S) for side in sides)
    jobs = [side.move() for side in sides]
    assert all(side.ended.wait(DEADLINE_S) for side in sides)
    assert [(job.poll(), job.error) for job in jobs] == [(PostingState.DONE, "")] * 2
    assert torch.equal(destination.tensor.cpu(), expected)
    for side in sides:
        side.group.abort("the test is over")
        assert side.group.join(DEADLINE_S)
