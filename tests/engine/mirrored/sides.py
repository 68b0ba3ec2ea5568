"""Engines whose memory no data path reaches. One runs in the test's process, the other has worker processes."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgrpc.engine import Engine, Rank
from kvgrpc.errors import InternalError, Reason
from tests.engine.made import layout, made_bytes
from tests.engine.mirrored.fake_device import FakeDevice
from tests.engine.support import Asked, Lead, Side, refused


class MirroredSide(Side):
    """An engine in this process with one rank and a device."""

    def __init__(self, lead: Lead, **options: Any) -> None:
        self.lead = lead
        self.device = FakeDevice(**options)
        self.engine = Engine.attach(lead.socket_path, pool=layout(), mirrored=True)
        self.ranks = [Rank(self.engine.ticket, 0, device=self.device)]

    def fill(self, blocks: Sequence[int], seed: int, rank: int = 0) -> NDArray[np.uint8]:
        assert not rank
        return self.device.fill(list(blocks), seed)

    def read(self, blocks: Sequence[int], rank: int = 0) -> NDArray[np.uint8]:
        assert not rank
        return self.device.read(list(blocks))


class MirroredWorkers(Side):
    """An engine whose workers are processes, each with a device of its own."""

    def __init__(self, lead: Lead, workers: Sequence[Asked], *data_paths: str) -> None:
        self.lead, self.ranks, self.workers = lead, [], workers
        self.engine = Engine.attach(lead.socket_path, pool=layout(), mirrored=True, world_size=len(workers))
        ticket = self.engine.ticket
        for rank, worker in enumerate(workers):
            given = {"socket_path": ticket.socket_path, "secret": ticket.secret.hex()}
            worker.send(op="attach", memory_bytes=ticket.memory_bytes, rank=rank, data_paths=data_paths, **given)
        assert [worker.answer() for worker in workers] == ["attached"] * len(workers)

    def fill_all(self, blocks: Sequence[int], seed: int) -> list[str]:
        """Fills each rank's blocks with different bytes. Returns what `read_all` returns where they arrive."""
        for rank, worker in enumerate(self.workers):
            assert worker.ask(op="fill", blocks=blocks, seed=seed + rank) == "filled"
        made = [made_bytes(blocks, seed + rank) for rank in range(len(self.workers))]
        return [hashlib.sha256(some.tobytes()).hexdigest() for some in made]

    def read_all(self, blocks: Sequence[int]) -> list[str]:
        return [worker.ask(op="read", blocks=blocks) for worker in self.workers]

    def close(self) -> None:
        self.engine.close()
        for worker in self.workers:
            worker.ask(op="detach")


def check_not_at_rest(side: MirroredSide) -> None:
    """Checks that the rank reports possible accesses to its memory, and does not give it back."""
    side.engine.close()
    with refused(Reason.DATA_PATH_FAILED, InternalError):
        side.ranks.pop().close()


def mirrors() -> dict[int, int]:
    """Returns the mirrors that this process has open: inode number -> descriptor. Inode numbers are never reused."""
    found = [int(fd.name) for fd in Path("/proc/self/fd").iterdir() if "memfd:kvgrpc-pool" in _target(fd)]
    return {os.fstat(fd).st_ino: fd for fd in found}


def _target(fd: Path) -> str:
    try:
        return str(fd.readlink())
    except FileNotFoundError:
        return ""  # the listed folder's own descriptor
