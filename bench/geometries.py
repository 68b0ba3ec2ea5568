"""Pairs of engines that split and lay out the same KV in different ways, for `python -m bench geometry`."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kvgrpc.core.values.block_ids import Ids
from kvgrpc.core.values.bridge import Bridge, BridgeSide
from kvgrpc.core.values.chunks import Chunk
from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout, Region, uniform_layout

LAYERS, HEADS, HEAD_DIM, BLOCK_TOKENS = 8, 8, 128, 16
_ELEMENT_BYTES = 2
_TOKEN_BYTES = LAYERS * 2 * HEADS * HEAD_DIM * _ELEMENT_BYTES


@dataclass(frozen=True)
class Geometry:
    """One pair. All groups of each side hold the same tokens."""

    name: str
    source: BridgeSide
    destination: BridgeSide
    tokens: int

    def blocks(self, number: int) -> tuple[Ids, ...]:
        """Returns scattered blocks of each group of the source (0) or the destination (1), in token order. Groups that
        share a space have no block in common.
        """
        groups = (self.source, self.destination)[number].pool.groups
        order = np.random.default_rng(number + 1).permutation(max(group.blocks for group in groups)).astype(np.int64)
        found, at = [], 0
        for group in groups:
            count = group.blocks_of(self.tokens)
            found.append(order[at : at + count])
            at += count if group.space else 0
        return tuple(found)

    def chunk(self) -> Chunk:
        """Returns the chunk of all these blocks."""
        source, destination = self.blocks(0), self.blocks(1)
        bridge = Bridge(self.source, self.destination)
        begins = tuple(bridge.begins(i, self.tokens, len(ids)) for i, ids in enumerate(destination))
        return Chunk(source, destination, None, begins)


@dataclass(frozen=True)
class _Split:
    """Split and layout of one engine's KV."""

    ranks: int = 1
    block_tokens: int = BLOCK_TOKENS
    order: str = "head_major"
    heads: int = HEADS
    """Number of the model's heads."""
    kind: GroupKind = GroupKind.FULL_ATTENTION

    def side(self, tokens: int) -> BridgeSide:
        """Returns an engine with room for `tokens` tokens, with a region for each layer."""
        heads = max(self.heads // self.ranks, 1)
        window = tokens // 2 if self.kind is GroupKind.SLIDING_WINDOW else 0
        shape = self.block_tokens, tokens // self.block_tokens, heads, HEAD_DIM, "bfloat16"
        group = Group("kv", self.kind, LAYERS, *shape, self.order, window, self.heads)
        return BridgeSide(uniform_layout(group, 2 * self.block_tokens * heads * HEAD_DIM * _ELEMENT_BYTES), self.ranks)


_PLAIN = _Split()
_PAIRS: dict[str, tuple[_Split, _Split]] = {
    "tp 1 to 1": (_PLAIN, _PLAIN),
    "tp 2 to 2": (_Split(2), _Split(2)),
    "tp 1 to 2": (_PLAIN, _Split(2)),
    "tp 2 to 1": (_Split(2), _PLAIN),
    "one head tp 1 to 2": (_Split(heads=1), _Split(2, heads=1)),
    "window": (_Split(kind=GroupKind.SLIDING_WINDOW),) * 2,
    "blocks of 32 to 16": (_Split(block_tokens=32), _PLAIN),
    "blocks of 16 to 32": (_PLAIN, _Split(block_tokens=32)),
    "head- to token-major": (_PLAIN, _Split(order="token_major")),
    "token-major tp 1 to 2": (_Split(order="token_major"), _Split(2, order="token_major")),
}


def _split(source: _Split, destination: _Split) -> Callable[[int], tuple[BridgeSide, BridgeSide]]:
    return lambda tokens: (source.side(tokens), destination.side(tokens))


def _aliased(tokens: int) -> tuple[BridgeSide, BridgeSide]:
    """Returns two groups of half the layers each in one space: their blocks alias the same bytes."""
    (group,) = _PLAIN.side(tokens).pool.groups
    nbytes = BLOCK_TOKENS * 2 * HEADS * HEAD_DIM * _ELEMENT_BYTES
    layers = LAYERS // 2
    groups = tuple(
        replace(group, name=name, layers=layers, blocks=2 * group.blocks, space="all") for name in ("even", "odd")
    )
    regions = tuple(
        Region(number, layer, 1, layer * nbytes, layers * nbytes, nbytes)
        for number in (0, 1)
        for layer in range(layers)
    )
    side = BridgeSide(PoolLayout(groups, regions, 2 * group.blocks * layers * nbytes), 1)
    return side, side


_MADE: dict[str, Callable[[int], tuple[BridgeSide, BridgeSide]]] = {
    **{name: _split(*pair) for name, pair in _PAIRS.items()},
    "aliased groups": _aliased,
}
NAMES = tuple(_MADE)


def geometry(name: str, tokens: int) -> Geometry:
    """Returns the pair of that name with `tokens` tokens, a multiple of all its block sizes."""
    return Geometry(name, *_MADE[name](tokens), tokens)


def geometry_moving(name: str, nbytes: int) -> Geometry:
    """Returns the pair of that name in which about `nbytes` bytes arrive."""
    tokens = tokens_of(nbytes)
    some = geometry(name, tokens)
    arriving = Bridge(some.source, some.destination).bytes_of([some.chunk()])
    return geometry(name, max(tokens * nbytes // arriving // 64, 1) * 64)


def tokens_of(nbytes: int) -> int:
    """Returns the number of tokens that have about `nbytes` bytes of KV with all heads."""
    return max(nbytes // _TOKEN_BYTES // 64, 1) * 64
