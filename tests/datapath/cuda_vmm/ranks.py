"""Ranks of this process with memory of fake GPUs, for tests of the data path."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvgrpc.core.values.endpoints import CudaVmmEndpoint, RankEndpoint
from kvgrpc.datapath.base import DataPathUnavailable
from kvgrpc.datapath.cuda_vmm.path import CudaVmmPath, CudaVmmRemote
from kvgrpc.datapath.host.memory import PrivateMemory
from tests.datapath.cuda_vmm.fake_driver import UNIT, ExportedMemory, FakeDriver, plain
from tests.datapath.movers import until
from tests.datapath.peers import (
    GUARD,
    Bytes,
    content,
    reach,
    runs_of,
)

SIZES = (3 * UNIT + 5, UNIT)
NBYTES = sum(SIZES)
WHOLE = runs_of((0, 0, NBYTES))


class Rank:
    """A rank in this process, with its own view of the machine's GPUs."""

    def __init__(self, memory: PrivateMemory, driver: FakeDriver) -> None:
        self.driver = driver
        self.memory = memory
        self.path = CudaVmmPath(memory, driver)

    def offer(self) -> CudaVmmEndpoint:
        part = self.path.offer(RankEndpoint(0)).cuda_vmm
        assert part is not None
        return part

    def reach(self, part: CudaVmmEndpoint) -> CudaVmmRemote:
        remote = reach(self.path, RankEndpoint(0, cuda_vmm=part))
        assert isinstance(remote, CudaVmmRemote)
        return remote

    def refusal(self, part: CudaVmmEndpoint | None) -> str:
        """Returns why it does not reach an endpoint; asserts that nothing of the attempt is left."""
        gc.collect()  # frees objects of earlier tests
        before, held = _descriptors(), self.driver.left
        with pytest.raises(DataPathUnavailable) as refused:
            reach(self.path, RankEndpoint(0, cuda_vmm=part))
        until(lambda: _descriptors() <= before)  # the answering thread closes its descriptor too
        assert self.driver.left == held
        return refused.value.message


def _descriptors() -> int:
    """Counts this process's descriptors, except those that threads wait by: a thread that just started adds one."""
    count = 0
    for one in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            count += "eventpoll" not in str(one.readlink())
    return count


@contextmanager
def source(driver: FakeDriver | None = None, device: int = 0) -> Iterator[Rank]:
    driver = driver or FakeDriver()
    memory = ExportedMemory(SIZES, driver, device)
    rank = Rank(memory, driver)
    try:
        yield rank
    finally:
        rank.path.close()
        memory.close()
        assert driver.left == (0, 0)


@contextmanager
def destination(driver: FakeDriver | None = None, nbytes: int = NBYTES) -> Iterator[tuple[Rank, Bytes]]:
    memory, (array,) = plain((nbytes,))
    array[:] = GUARD
    rank = Rank(memory, driver or FakeDriver())
    try:
        yield rank, array
    finally:
        rank.path.close()
        assert rank.driver.left == (0, 0)


def filled(rank: Rank, seed: int) -> Bytes:
    """Fills a rank's memory with the bytes of that seed, and returns them."""
    assert isinstance(rank.memory, ExportedMemory)
    made, at = content(seed, NBYTES), 0
    for part in rank.memory.views():
        part[:] = made[at : at + len(part)]
        at += len(part)
    return made
