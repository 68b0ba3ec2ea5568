"""What a run measures, as data: pools, cases, repeats."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvgrpc.config import DATA_PATHS, PoolConfig
from kvgrpc.core.descriptors import Ids, Runs, plan_runs

BLOCK_TOKENS = 16
_HEAD_DIM = 64
_DTYPE = "float16"
_HEAD_BYTES = 2 * BLOCK_TOKENS * _HEAD_DIM * 2  # K and V, two bytes an element
LAYOUTS = ("scattered", "contiguous")
BLOCK_BYTES = (4 << 20, 64 << 10, 16 << 10)
PARTS = ("bandwidth", "latency", "leases")
_SEEDS = {"source": 1, "destination": 2}


@dataclass(frozen=True)
class Case:
    """One move: all blocks of a pool, over one data path."""

    data_path: str
    block_bytes: int
    blocks: int
    layout: str
    threads: int

    @property
    def nbytes(self) -> int:
        return self.block_bytes * self.blocks

    def ids(self, side: str) -> Ids:
        """Block ids of a side, in token order: as they lie, or in an order of its own that is the same in every run."""
        if self.layout == "contiguous":
            return np.arange(self.blocks, dtype=np.int64)
        return np.random.default_rng(_SEEDS[side]).permutation(self.blocks).astype(np.int64)

    def runs(self) -> Runs:
        """What is copied, coalesced: the same for us and for every baseline."""
        layout = pool(self.block_bytes, self.blocks).layout()
        return plan_runs(layout, layout, [self.ids("source")], [self.ids("destination")])

    def block_runs(self) -> Runs:
        """The same bytes with one run for each block."""
        source, destination = (self.ids(side) * self.block_bytes for side in _SEEDS)
        return Runs(source, destination, np.full(self.blocks, self.block_bytes, dtype=np.int64))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Plan:
    """One run. `--quick` shrinks everything until it fits a test suite."""

    data_paths: tuple[str, ...] = DATA_PATHS
    block_bytes: tuple[int, ...] = BLOCK_BYTES
    layouts: tuple[str, ...] = LAYOUTS
    parts: tuple[str, ...] = PARTS
    pool_bytes: int = 256 << 20
    repeats: int = 9
    copy_threads: int = 2
    pulls: int = 300
    """Samples of the one-block pull and of empty calls."""
    renewals: int = 30
    lease_cycles: int = 400
    leases_few: int = 1_000
    leases_many: int = 100_000
    idle_s: float = 5.0
    quick: bool = False

    def cases(self, data_path: str, block_bytes: int) -> list[Case]:
        """The cases of one pool over one data path."""
        threads = 1 if data_path == "nixl" else self.copy_threads
        blocks = self.pool_bytes // block_bytes
        return [Case(data_path, block_bytes, blocks, layout, threads) for layout in self.layouts]


QUICK = Plan(
    block_bytes=(16 << 10,),
    pool_bytes=4 << 20,
    repeats=3,
    pulls=20,
    renewals=3,
    lease_cycles=20,
    leases_few=100,
    leases_many=1_000,
    idle_s=0.5,
    quick=True,
)


def pool(block_bytes: int, blocks: int) -> PoolConfig:
    """A pool of one layer with blocks of `block_bytes`, which must be a multiple of 4 KiB."""
    return PoolConfig(1, block_bytes // _HEAD_BYTES, _HEAD_DIM, BLOCK_TOKENS, blocks, _DTYPE)
