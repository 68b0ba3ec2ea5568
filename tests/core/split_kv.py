"""Engines that split and lay out the same KV in their own ways, with memory bytes that identify their place in it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvgrpc.core.values.bridge import BridgeSide
from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout, Region, Strides, TensorKind, uniform_layout
from kvgrpc.core.values.plans import PairRuns
from kvgrpc.core.values.strips import Repack

CANARY = 0xA5
"""Byte that fills memory which nobody wrote."""
ALL_TOKENS = range(1 << 12)
Memory = NDArray[np.uint8]
Numbers = NDArray[np.int64]
_PARTS = {TensorKind.KV: range(2), TensorKind.V: range(1, 2)}
"""Parts that a region has: keys (0) and values (1); other tensors have one part."""


class Held(NamedTuple):
    """Tokens that blocks of one group hold, in token order."""

    blocks: Sequence[int]
    tokens: range
    begin: int = 0
    """The first token of the first block."""
    group: int = 0


def packed(group: Group, parts: int) -> Strides:
    """Returns the strides of a block whose elements, one byte each, are packed."""
    run = group.head_dim
    part = run * group.kv_heads * group.block_tokens
    if group.order == "head_major":
        return Strides(part * parts, part, run * group.block_tokens, run)
    return Strides(part * parts, part, run, run * group.kv_heads)


def _view(group: Group, region: Region) -> tuple[tuple[int, int, int, int, int], Strides]:
    """Returns the known sizes of a block (layers, keys and values, heads, tokens, bytes), and their strides."""
    parts = len(_PARTS.get(region.tensor, range(1)))
    strides = region.strides or packed(group, parts)
    if group.kind is GroupKind.STATE or group.dtype != "uint8" or not any(strides):
        return (1, 1, 1, 1, region.block_bytes), Strides(0, 0, 0, 0)
    if not (strides.token or strides.key_element):
        return (region.layers, 1, group.kv_heads, 1, parts * group.block_tokens * group.head_dim), strides
    return (region.layers, parts, group.kv_heads, group.block_tokens, group.head_dim), strides


def _values(place: Numbers) -> Memory:
    """Computes the byte at each place of the model's KV: rarely equal to a nearby one, and never the canary."""
    mixed = place.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(57)).astype(np.uint8)


@dataclass
class SplitKV:
    """One engine whose elements have a byte each; `memories` are those of its ranks."""

    side: BridgeSide
    memories: list[Memory] = field(init=False)

    def __post_init__(self) -> None:
        sizes = [self.side.pool.stage_bytes[self.stage(rank)] for rank in range(self.side.ranks)]
        self.memories = [np.empty(nbytes, dtype=np.uint8) for nbytes in sizes]
        self.clear()

    def clear(self) -> None:
        """Fills all memories with the canary."""
        for memory in self.memories:
            memory[:] = CANARY

    def stage(self, rank: int) -> int:
        """Returns the stage of a rank; ranks are numbered stage by stage."""
        return rank // self.side.stage_ranks

    @property
    def group(self) -> Group:
        return self.side.pool.groups[0]

    def _first_head(self, rank: int, group: Group) -> int:
        """Returns the first of the model's heads that a rank has; for states without sections, the rank's index."""
        ranks = self.side.stage_ranks
        if group.sections:
            return 0
        total = group.kv_heads if group.kind is GroupKind.MLA else group.total_kv_heads or group.kv_heads * ranks
        return rank % ranks // (ranks * group.kv_heads // total) * group.kv_heads

    def _in_sections(self, rank: int, group: Group) -> Numbers:
        """Returns the place in the whole model's state of each byte of a rank's state."""
        found, begin = [], 0
        for nbytes, total in group.sections:
            copies = self.side.stage_ranks * nbytes // total
            found.append(begin + rank % self.side.stage_ranks // copies * nbytes + np.arange(nbytes))
            begin += total
        return np.concatenate(found)

    def _write(self, memory: Memory, rank: int, held: Held) -> None:
        """Writes a rank's share of `held` to its place in memory."""
        group = self.side.pool.groups[held.group]
        for region in self.side.pool.regions:
            if (region.group, region.stage) != (held.group, self.stage(rank)):
                continue
            counts, strides = _view(group, region)
            i, layer, part, head, token, byte = np.ix_(*map(np.arange, (len(held.blocks), *counts)))
            block = np.array(held.blocks, dtype=np.int64).reshape(i.shape)
            at = region.offset + block * region.stride_bytes
            for index, stride in zip((layer, part, head), strides[:3], strict=True):
                at = at + index * stride
            rows = token * strides.token + byte
            if strides.key_element:
                keys = part + _PARTS.get(region.tensor, range(1)).start == 0
                rows = np.where(keys, byte * strides.key_element + token, rows)
            at = at + rows
            tokens = held.begin + i * group.block_tokens + token
            place = held.group * 64 + region.first_layer + layer
            place = place * 2 + part + _PARTS.get(region.tensor, range(1)).start
            place = place * 4096 + head + self._first_head(rank, group)
            byte = self._in_sections(rank, group)[byte] if group.sections else byte
            place = (place * 4096 + tokens) * 65536 + byte
            wanted = np.broadcast_to((tokens >= held.tokens.start) & (tokens < held.tokens.stop), at.shape)
            memory[at[wanted]] = _values(place)[wanted]

    def fill(self, blocks: Sequence[int], begin: int = 0, ranks: Sequence[int] | None = None, group: int = 0) -> None:
        """Fills these blocks on every rank, or on `ranks`."""
        for rank in range(self.side.ranks) if ranks is None else ranks:
            self._write(self.memories[rank], rank, Held(blocks, ALL_TOKENS, begin, group))

    def check(self, blocks: Sequence[int], tokens: range, begin: int = 0, ranks: Sequence[int] | None = None) -> None:
        """Asserts that every rank has its KV of these tokens in these blocks, and that nothing else was written."""
        self.check_all([Held(blocks, tokens, begin)], ranks)

    def check_all(self, held: Sequence[Held], ranks: Sequence[int] | None = None) -> None:
        """Asserts the same for several groups at once."""
        for rank in range(self.side.ranks) if ranks is None else ranks:
            memory = self.memories[rank]
            expected = np.full(len(memory), CANARY, dtype=np.uint8)
            for some in held:
                self._write(expected, rank, some)
            wrong = np.flatnonzero(memory != expected)
            assert not len(wrong), f"rank {rank} has other bytes at {len(wrong)} places, first at {wrong[0]}"


def copy(runs: Runs, repack: Repack | None, source: Memory, destination: Memory, written: Memory) -> None:
    """Moves bytes as a data path does; asserts that no byte is written that is marked in `written`."""
    parts = [runs]
    if repack is not None:
        staging = np.zeros(repack.staging_bytes, dtype=np.uint8)
        for src, dst, nbytes in zip(runs.src, runs.dst, runs.nbytes, strict=True):
            staging[dst : dst + nbytes] = source[src : src + nbytes]
        _check_straight(repack, runs, source, staging)
        source, parts = staging, [strip.runs() for strip in repack.strips]
        ends = [strip.ends() for strip in repack.strips]
        assert all(src <= len(staging) and dst <= len(destination) for src, dst in ends)
    for part in parts:
        for src, dst, nbytes in zip(part.src, part.dst, part.nbytes, strict=True):
            assert not written[dst : dst + nbytes].any()
            written[dst : dst + nbytes] = 1
            destination[dst : dst + nbytes] = source[src : src + nbytes]


def _check_straight(repack: Repack, runs: Runs, source: Memory, staging: Memory) -> None:
    """Asserts that strips read the same bytes at the source as in the staging buffer."""
    straight = repack.at_source(runs)
    assert straight is not None, "a block is never cut"
    for strip, other in zip(repack.strips, straight, strict=True):
        staged, there = strip.runs(), other.runs()
        assert np.array_equal(staged.dst, there.dst)
        for at, place in zip(staged.src, there.src, strict=True):
            assert np.array_equal(staging[at : at + strip.run_bytes], source[place : place + strip.run_bytes])


def move(planned: Sequence[PairRuns], source: SplitKV, destination: SplitKV) -> None:
    """Performs all planned runs."""
    written = [np.zeros_like(memory) for memory in destination.memories]
    for some in planned:
        rank, source_rank = some.pair
        copy(some.runs, some.repack, source.memories[source_rank], destination.memories[rank], written[rank])


def made_split(
    ranks: int = 1, tokens: int = 16, order: str = "head_major", total: int = 4, *, dim: int = 16, blocks: int = 24,
    latent: bool = False, apart: bool = False, stages: int = 1,
) -> SplitKV:  # fmt: skip
    """Makes an engine of two layers. `total`: heads of the model; `apart`: keys and values in separate regions;
    `ranks`: ranks of each of the one or two `stages`.
    """
    kind = GroupKind.MLA if latent else GroupKind.FULL_ATTENTION
    heads, of_model = (1, 0) if latent else (max(total // ranks, 1), total)
    group = Group("kv", kind, 2, tokens, blocks, heads, dim, "uint8", order, total_kv_heads=of_model)
    part = tokens * heads * dim
    if stages == 2:
        pool = uniform_layout(group, part if latent else 2 * part)
        staged = tuple(replace(region, offset=64 * i, stage=i) for i, region in enumerate(pool.regions))
        return SplitKV(BridgeSide(PoolLayout(pool.groups, staged, pool.total_bytes), 2 * ranks))
    if not apart:
        return SplitKV(BridgeSide(uniform_layout(group, part if latent else 2 * part), ranks))
    regions = tuple(
        Region(0, layer, 1, (2 * layer + i) * blocks * part, part, part, tensor)
        for layer in range(2)
        for i, tensor in enumerate((TensorKind.K, TensorKind.V))
    )
    return SplitKV(BridgeSide(PoolLayout((group,), regions, 4 * blocks * part), ranks))
