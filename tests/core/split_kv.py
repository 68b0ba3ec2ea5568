"""Engines that split and lay out the same KV in their own ways, with memories of bytes that say what they are of."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kvgrpc.core.values.bridge import Side
from kvgrpc.core.values.descriptors import Runs
from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout, Region, Strides, TensorKind, uniform_layout
from kvgrpc.core.values.plans import PairRuns
from kvgrpc.core.values.strips import Repack

CANARY = 0xA5
"""What memory has that nobody wrote."""
Memory = NDArray[np.uint8]
Place = tuple[int, int, int, int]
"""Layer, part (keys or values), head of the model, token of the prompt."""
_PARTS = {TensorKind.KV: (0, 1), TensorKind.K: (0,), TensorKind.V: (1,), TensorKind.LATENT: (0,)}


def packed(group: Group, parts: int) -> Strides:
    """Where the elements of a block stand that are side by side; of one byte each."""
    run = group.head_dim
    part = run * group.kv_heads * group.block_tokens
    if group.order == "head_major":
        return Strides(part * parts, part, run * group.block_tokens, run)
    return Strides(part * parts, part, run, run * group.kv_heads)


def value(place: Place, nbytes: int) -> Memory:
    """The bytes of one head of one token: others for every place."""
    return np.random.default_rng(place).integers(0, 128, nbytes, dtype=np.uint8)


@dataclass
class SplitKV:
    """One engine with one group of elements of a byte; `memories` are those of its ranks."""

    side: Side
    memories: list[Memory] = field(init=False)

    def __post_init__(self) -> None:
        sizes = [self.side.pool.stage_bytes[self.stage(rank)] for rank in range(self.side.ranks)]
        self.memories = [np.empty(nbytes, dtype=np.uint8) for nbytes in sizes]
        self.clear()

    def clear(self) -> None:
        """Nothing was written anywhere."""
        for memory in self.memories:
            memory[:] = CANARY

    def stage(self, rank: int) -> int:
        """Ranks are numbered stage by stage."""
        return rank // self.side.stage_ranks

    @property
    def group(self) -> Group:
        return self.side.pool.groups[0]

    def places(self, rank: int, blocks: Sequence[int], begin: int = 0) -> dict[Place, int]:
        """Where a rank has what these blocks hold, of which the first begins with token `begin`."""
        group, pool = self.group, self.side.pool
        total = group.kv_heads if group.kind is GroupKind.MLA else group.total_kv_heads
        ranks = self.side.stage_ranks
        copies = ranks * group.kv_heads // total
        first = rank % ranks // copies * group.kv_heads
        found = {}
        for region in (region for region in pool.regions if region.stage == self.stage(rank)):
            parts = _PARTS[region.tensor]
            strides = region.strides or packed(group, len(parts))
            for i, block in enumerate(blocks):
                for layer, p, head, token in np.ndindex(region.layers, len(parts), group.kv_heads, group.block_tokens):
                    at = region.offset + block * region.stride_bytes + layer * strides.layer + p * strides.part
                    place = region.first_layer + layer, parts[p], first + head, begin + i * group.block_tokens + token
                    found[place] = at + head * strides.head + token * strides.token
        return found

    def fill(self, blocks: Sequence[int], begin: int = 0, ranks: Sequence[int] | None = None) -> None:
        """Every rank computes its KV of these blocks, or some of them do."""
        for rank in range(self.side.ranks) if ranks is None else ranks:
            memory = self.memories[rank]
            for place, at in self.places(rank, blocks, begin).items():
                memory[at : at + self.group.head_dim] = value(place, self.group.head_dim)

    def check(
        self, blocks: Sequence[int], tokens: range, begin: int = 0, ranks: Sequence[int] | None = None
    ) -> None:  # fmt: skip
        """Asserts that every rank has its KV of these tokens in these blocks, and that nothing else was written."""
        for rank in range(self.side.ranks) if ranks is None else ranks:
            memory = self.memories[rank]
            expected = np.full(len(memory), CANARY, dtype=np.uint8)
            for place, at in self.places(rank, blocks, begin).items():
                if place[3] in tokens:
                    expected[at : at + self.group.head_dim] = value(place, self.group.head_dim)
            wrong = np.flatnonzero(memory != expected)
            assert not len(wrong), f"rank {rank} has other bytes at {len(wrong)} places, first at {wrong[0]}"


def copy(runs: Runs, repack: Repack | None, source: Memory, destination: Memory, written: Memory) -> None:
    """Does what a data path does, byte for byte; asserts that no byte is written that `written` counts already."""
    parts = [runs]
    if repack is not None:
        staging = np.zeros(repack.staging_bytes, dtype=np.uint8)
        for src, dst, nbytes in zip(runs.src, runs.dst, runs.nbytes, strict=True):
            staging[dst : dst + nbytes] = source[src : src + nbytes]
        source, parts = staging, [strip.runs() for strip in repack.strips]
        ends = [strip.ends() for strip in repack.strips]
        assert all(src <= len(staging) and dst <= len(destination) for src, dst in ends)
    for part in parts:
        for src, dst, nbytes in zip(part.src, part.dst, part.nbytes, strict=True):
            assert not written[dst : dst + nbytes].any()
            written[dst : dst + nbytes] = 1
            destination[dst : dst + nbytes] = source[src : src + nbytes]


def move(planned: Sequence[PairRuns], source: SplitKV, destination: SplitKV) -> None:
    """Moves all that was planned."""
    written = [np.zeros_like(memory) for memory in destination.memories]
    for some in planned:
        rank, source_rank = some.pair
        copy(some.runs, some.repack, source.memories[source_rank], destination.memories[rank], written[rank])


def made_split(
    ranks: int = 1, tokens: int = 16, order: str = "head_major", total: int = 4, *, dim: int = 16, blocks: int = 24,
    latent: bool = False, apart: bool = False, stages: int = 1,
) -> SplitKV:  # fmt: skip
    """An engine of two layers; `total` heads of the model; `apart`: keys and values have regions of their own; `ranks`:
    of each of the `stages`, one or two.
    """
    kind = GroupKind.MLA if latent else GroupKind.FULL_ATTENTION
    heads, of_model = (1, 0) if latent else (max(total // ranks, 1), total)
    group = Group("kv", kind, 2, tokens, blocks, heads, dim, "uint8", order, total_kv_heads=of_model)
    part = tokens * heads * dim
    if stages == 2:
        pool = uniform_layout(group, part if latent else 2 * part)
        staged = tuple(replace(region, offset=64 * i, stage=i) for i, region in enumerate(pool.regions))
        return SplitKV(Side(PoolLayout(pool.groups, staged, pool.total_bytes), 2 * ranks))
    if not apart:
        return SplitKV(Side(uniform_layout(group, part if latent else 2 * part), ranks))
    regions = tuple(
        Region(0, layer, 1, (2 * layer + i) * blocks * part, part, part, tensor)
        for layer in range(2)
        for i, tensor in enumerate((TensorKind.K, TensorKind.V))
    )
    return SplitKV(Side(PoolLayout((group,), regions, 4 * blocks * part), ranks))
