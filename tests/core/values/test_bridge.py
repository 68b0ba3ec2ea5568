"""Bridges between engines that split and lay out the same KV in different ways, on bytes."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings, strategies as st

from kvgrpc.core.values.bridge import Bridge, Side
from kvgrpc.core.values.chunks import Chunk
from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout, Region, Strides, TensorKind
from kvgrpc.core.values.plans import PairRuns

CANARY = 0xA5
LAYERS, DIM, TOKENS = 3, 4, 24


@dataclass
class Engine:
    """One side: its pool, its ranks' memories, its blocks in token order and the token with which they begin."""

    side: Side
    total: int
    memories: list[np.ndarray]
    ids: np.ndarray
    begin: int

    def places(self, rank: int) -> dict[tuple[int, int, int, int], int]:
        """Where this rank has each (layer, part, head of the model, token of the prompt), by its own description."""
        group, pool = self.side.pool.groups[0], self.side.pool
        copies = max(self.side.ranks * group.kv_heads // self.total, 1)
        first = rank // copies * group.kv_heads
        found = {}
        for region in pool.regions:
            parts = {TensorKind.KV: (0, 1), TensorKind.K: (0,), TensorKind.V: (1,), TensorKind.LATENT: (0,)}[
                region.tensor
            ]
            strides = region.strides or packed(group, len(parts))
            for i, block in enumerate(self.ids.tolist()):
                at = region.offset + block * region.stride_bytes
                for layer in range(region.layers):
                    for p, part in enumerate(parts):
                        for head in range(group.kv_heads):
                            for token in range(group.block_tokens):
                                where = at + layer * strides.layer + p * strides.part
                                where += head * strides.head + token * strides.token
                                key = region.first_layer + layer, part, first + head
                                found[*key, self.begin + i * group.block_tokens + token] = where
        return found


def packed(group: Group, parts: int) -> Strides:
    run = group.head_dim
    part = run * group.kv_heads * group.block_tokens
    if group.order == "head_major":
        return Strides(part * parts, part, run * group.block_tokens, run)
    return Strides(part * parts, part, run, run * group.kv_heads)


def value(layer: int, part: int, head: int, token: int) -> np.ndarray:
    rng = np.random.default_rng((layer, part, head, token))
    return rng.integers(0, 128, DIM, dtype=np.uint8)


@st.composite
def engines(draw: st.DrawFn, kind: GroupKind, total: int, block_tokens: int) -> Engine:
    ranks = draw(st.sampled_from([1, 2, 4]))
    heads = 1 if kind is GroupKind.MLA else max(total // ranks, 1)
    order = draw(st.sampled_from(["token_major", "head_major"]))
    blocks = draw(st.integers(-(-TOKENS // block_tokens), 30))
    group = Group(
        "g", kind, LAYERS, block_tokens, blocks, heads, DIM, "uint8", order,
        total_kv_heads=0 if kind is GroupKind.MLA else total,
    )  # fmt: skip
    parts = 1 if kind is GroupKind.MLA else 2
    regions, at = [], 0
    tensors = (
        [TensorKind.LATENT] if parts == 1 else draw(st.sampled_from([[TensorKind.KV], [TensorKind.K, TensorKind.V]]))
    )
    for first, layers in draw(st.sampled_from([[(0, 3)], [(0, 1), (1, 1), (2, 1)], [(0, 2), (2, 1)]])):
        for tensor in tensors:
            there = 2 if tensor is TensorKind.KV else 1
            strides = draw(st.sampled_from([None, "interleaved"]))
            each = packed(group, there)
            nbytes = each.layer * layers
            # [layers, heads, tokens, parts x dim], as some engines keep it.
            made = Strides(heads * block_tokens * there * DIM, DIM, block_tokens * there * DIM, there * DIM)
            gap = draw(st.sampled_from([0, 5]))
            regions.append(Region(0, first, layers, at, nbytes + gap, nbytes, tensor, made if strides else None))
            at += blocks * (nbytes + gap) + 3
    pool = PoolLayout((group,), tuple(regions), at)
    begin = draw(st.integers(0, 1)) * block_tokens
    count = draw(st.integers(1, min(blocks, -(-(TOKENS - begin) // block_tokens))))
    ids = np.array(draw(st.permutations(range(blocks)))[:count], dtype=np.int64)
    memories = [np.full(at, CANARY, dtype=np.uint8) for _ in range(ranks)]
    return Engine(Side(pool, ranks), 1 if kind is GroupKind.MLA else total, memories, ids, begin)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Engine, Engine]:
    kind = draw(st.sampled_from([GroupKind.FULL_ATTENTION, GroupKind.FULL_ATTENTION, GroupKind.MLA]))
    total = draw(st.sampled_from([1, 2, 4, 8]))
    sizes = draw(st.sampled_from([(4, 4), (4, 8), (8, 4), (12, 4), (4, 12)]))
    return draw(engines(kind, total, sizes[0])), draw(engines(kind, total, sizes[1]))


def move(planned: list[PairRuns], source: Engine, destination: Engine) -> None:
    """Does what a data path would, byte for byte, and asserts that nothing is written twice."""
    written = [np.zeros(len(memory), dtype=bool) for memory in destination.memories]
    for some in planned:
        memory, into = source.memories[some.pair.source_rank], destination.memories[some.pair.rank]
        runs, seen = some.runs, written[some.pair.rank]
        if some.repack is not None:
            staging = np.zeros(some.repack.staging_bytes, dtype=np.uint8)
            for src, dst, nbytes in zip(runs.src, runs.dst, runs.nbytes, strict=True):
                staging[dst : dst + nbytes] = memory[src : src + nbytes]
            memory, parts = staging, [strip.runs() for strip in some.repack.strips]
            assert sum(part.total_bytes for part in parts) == some.total_bytes
            assert all(max(part.src + part.nbytes) <= some.repack.staging_bytes for part in parts)
        else:
            parts = [runs]
        for part in parts:
            for src, dst, nbytes in zip(part.src, part.dst, part.nbytes, strict=True):
                assert not seen[dst : dst + nbytes].any()
                seen[dst : dst + nbytes] = True
                into[dst : dst + nbytes] = memory[src : src + nbytes]


@settings(max_examples=600, deadline=None)
@given(pairs(), st.sampled_from([1, 8, 1024]))
def test_every_head_of_every_destination_rank_is_written_once_and_nothing_else(
    both: tuple[Engine, Engine], run_bytes_min: int
) -> None:
    source, destination = both
    for rank, memory in enumerate(source.memories):
        for key, at in source.places(rank).items():
            memory[at : at + DIM] = value(*key)
    bridge = Bridge(source.side, destination.side, run_bytes_min)
    chunk = Chunk((source.ids,), (destination.ids,), None, ((source.begin, destination.begin),))
    extent = bridge.extent(chunk, 0)
    move(bridge.plan([chunk]), source, destination)
    for rank, memory in enumerate(destination.memories):
        expected = np.full(len(memory), CANARY, dtype=np.uint8)
        for key, at in destination.places(rank).items():
            if key[3] in extent:
                expected[at : at + DIM] = value(*key)
        assert np.array_equal(memory, expected)
