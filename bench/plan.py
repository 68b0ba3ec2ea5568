"""Plans of runs, as data: pools, cases, repeats."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bench.geometries import NAMES
from kvgrpc.config import DATA_PATHS, PoolConfig
from kvgrpc.core.values.block_ids import Ids
from kvgrpc.core.values.bridge import Bridge, BridgeSide
from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.chunks import Chunk

BLOCK_TOKENS = 16
_HEAD_DIM = 64
_DTYPE = "float16"
_ELEMENT_BYTES = 2 * BLOCK_TOKENS * 2  # bytes of K and V for all tokens of a block, two bytes each
_HEAD_BYTES = _HEAD_DIM * _ELEMENT_BYTES
COLLECTIVE = "collective"
TCP = "-tcp"
"""Suffix of a data path whose processes run with UCX_TLS=tcp, as between two hosts."""
OVER_TCP = {"UCX_TLS": "tcp"}
WRITES = "-writes"
"""Suffix of a data path over which the source writes what it pushes (setting `source_writes`)."""
CUDA_VMM = "cuda_vmm"
HOST_PATHS = tuple(name for name in DATA_PATHS if name != CUDA_VMM)
"""Data paths between pools in host memory."""
PUSH_PATHS = (*HOST_PATHS, f"nixl{TCP}")
WRITING_PATHS = tuple(f"{name}{WRITES}" for name in ("nixl", f"nixl{TCP}"))
SOURCE_WRITES, YES = "KVGRPC_SOURCE_WRITES", "yes"
"""Environment variable of `source_writes`, and its value for such a data path."""
TLS_DIR = "KVGRPC_TLS_DIR"
"""Environment variable with the folder of a server's TLS files."""
METRICS = "KVGRPC_METRICS"
"""Environment variable with the address of a server's metrics."""
_COPYING = ("shm", "cma")
LAYERS = 32
LAYOUTS = ("scattered", "contiguous")
BLOCK_BYTES = (4 << 20, 64 << 10, 16 << 10)
PARTS = ("bandwidth", "latency", "leases", "rate", "tls", "metrics")
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

    @property
    def title(self) -> str:
        """The case's name for people."""
        return f"{self.data_path} {self.blocks} x {self.block_bytes >> 10} KB {self.layout}"

    def ids(self, side: str) -> Ids:
        """Returns the block ids of a side in token order: contiguous, or in a random order that is the same in every
        run.
        """
        if self.layout == "contiguous":
            return np.arange(self.blocks, dtype=np.int64)
        return np.random.default_rng(_SEEDS[side]).permutation(self.blocks).astype(np.int64)

    def runs(self) -> Runs:
        """Returns the coalesced runs to copy, which are the same for us and for every baseline."""
        side = BridgeSide(pool(self.block_bytes, self.blocks).layout(), 1)
        (planned,) = Bridge(side, side).plan([Chunk((self.ids("source"),), (self.ids("destination"),), None)])
        return planned.runs

    def block_runs(self) -> Runs:
        """Returns the same bytes with one run for each block."""
        source, destination = (self.ids(side) * self.block_bytes for side in _SEEDS)
        return Runs(source, destination, np.full(self.blocks, self.block_bytes, dtype=np.int64))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Plan:
    """Settings of every run. `--quick` shrinks everything until it fits a test suite."""

    data_paths: tuple[str, ...] = HOST_PATHS
    block_bytes: tuple[int, ...] = BLOCK_BYTES
    layouts: tuple[str, ...] = LAYOUTS
    pool_bytes: int = 256 << 20
    repeats: int = 9
    copy_threads: int = 2
    quick: bool = False

    def steps(self) -> int:
        """Returns the number of steps that a run tells of."""
        return len(self.data_paths) * len(self.block_bytes) * len(self.layouts)

    def cases(self, data_path: str, block_bytes: int) -> list[Case]:
        """Returns the cases of one pool over one data path."""
        threads = self.copy_threads if path_of(data_path) in _COPYING else 1
        blocks = self.pool_bytes // block_bytes
        return [Case(data_path, block_bytes, blocks, layout, threads) for layout in self.layouts]


@dataclass(frozen=True)
class PullPlan(Plan):
    """A run of `python -m bench pull`."""

    parts: tuple[str, ...] = PARTS
    pulls: int = 300
    """Number of samples of the one-block pull and of empty calls."""
    renewals: int = 30
    lease_cycles: int = 400
    leases_few: int = 1_000
    leases_many: int = 100_000
    idle_s: float = 5.0
    rested_pulls: int = 100
    """Number of samples of the one-block pull after a rest."""
    in_flight: int = 64
    """Number of one-block pulls in flight, for their rate."""
    rate_pulls: int = 640
    """Number of pulls in a sample of the rate."""
    scraped_leases: int = 10_000
    """Number of leases of a server whose scrapes are measured."""
    checksum: bool = False
    """Pull whole pools with checksums, and right afterwards without them."""

    def steps(self) -> int:
        single = sum({"bandwidth": 0, "tls": 2}.get(part, 1) for part in self.parts)
        return single + (super().steps() if "bandwidth" in self.parts else 0)

    def device_steps(self) -> int:
        """Returns the number of steps with a device: out of it and into it, or between engines on it."""
        ways = sum(1 if path == CUDA_VMM else 2 for path in self.data_paths)
        return ways * len(self.block_bytes) * len(self.layouts)


@dataclass(frozen=True)
class PushPlan(Plan):
    """A run of `python -m bench push`."""

    data_paths: tuple[str, ...] = PUSH_PATHS
    layouts: tuple[str, ...] = ("scattered",)
    pushes: int = 300
    """Number of samples of the push of one block."""
    control_blocks: int = 8_192
    handovers: int = 30
    """Number of samples of the hand-over of `control_blocks` blocks."""
    waiting_few: int = 100
    waiting_many: int = 10_000
    waiting_pushes: int = 400
    """Number of pushes beside each of these numbers of registrations."""

    def steps(self) -> int:
        return super().steps() + 3


@dataclass(frozen=True)
class LayerwisePlan(Plan):
    """A run of `python -m bench layerwise`. `block_bytes` are of one layer."""

    data_paths: tuple[str, ...] = PUSH_PATHS
    block_bytes: tuple[int, ...] = (64 << 10,)
    layouts: tuple[str, ...] = ("scattered",)
    layers: int = LAYERS
    prefill_ratio: float = 1.5
    """Duration of a prefill over that of moving all its blocks."""


@dataclass(frozen=True)
class GeometryPlan(Plan):
    """A run of `python -m bench geometry`. `pool_bytes` is about what each pull moves. The blocks have the sizes that
    the engines with these names give them.
    """

    data_paths: tuple[str, ...] = ("shm",)
    block_bytes: tuple[int, ...] = ()
    names: tuple[str, ...] = NAMES

    def steps(self) -> int:
        return len(self.data_paths) * len(self.names) + 2


@dataclass(frozen=True)
class TensorsPlan(Plan):
    """A run of `python -m bench tensors`. `block_bytes` are of one tensor, `pool_bytes` of all that move at a time."""

    data_paths: tuple[str, ...] = (COLLECTIVE, "shm")
    block_bytes: tuple[int, ...] = (64 << 20, 16 << 20, 4 << 20, 1 << 20)
    gets_at_once: int = 8
    """Number of the consumer's threads that fetch, and of raw Gloo's messages in flight."""
    full_tensors: int = 8
    """Number of tensors for which a store has room when it is measured at its limit."""

    def steps(self) -> int:
        return len(self.data_paths) * (len(self.block_bytes) + 1)


_FEW: dict[str, Any] = {"block_bytes": (16 << 10,), "pool_bytes": 4 << 20, "repeats": 3, "quick": True}
PULL_QUICK = PullPlan(
    **_FEW,
    pulls=20,
    renewals=3,
    lease_cycles=20,
    leases_few=100,
    leases_many=1_000,
    idle_s=0.5,
    rested_pulls=3,
    rate_pulls=64,
    scraped_leases=100,
)
PUSH_QUICK = PushPlan(
    **_FEW, pushes=10, control_blocks=256, handovers=2, waiting_few=10, waiting_many=100, waiting_pushes=20
)
LAYERWISE_QUICK = LayerwisePlan(**_FEW)
GEOMETRY_QUICK = GeometryPlan(**_FEW | {"block_bytes": ()})
TENSORS_QUICK = TensorsPlan(**_FEW | {"block_bytes": (256 << 10,)})


def path_of(name: str) -> str:
    """Returns the data path's name without suffixes, as servers know the data path."""
    return name.removesuffix(WRITES).removesuffix(TCP)


def environment_of(name: str) -> dict[str, str]:
    """Returns the environment variables that the processes of a data path get in addition to ours, which they
    override.
    """
    transport = OVER_TCP if TCP in name else {}
    return transport | {SOURCE_WRITES: YES if name.endswith(WRITES) else "no"}


def pool(block_bytes: int, blocks: int, layers: int = 1) -> PoolConfig:
    """Returns a pool whose blocks have `block_bytes` in each layer: a multiple of 4 KiB, or of 64 bytes below that."""
    heads, dim = block_bytes // _HEAD_BYTES, _HEAD_DIM
    if not heads:
        heads, dim = 1, block_bytes // _ELEMENT_BYTES
    return PoolConfig(layers, heads, dim, BLOCK_TOKENS, blocks, _DTYPE)
