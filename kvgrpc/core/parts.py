"""The parts of a push: what its source has handed over so far, block by block and layer by layer.

Parts of one epoch have no order between layers, but within a layer each one goes on where the one before stopped. So
two numbers say all: the blocks of each group in token order, and how many of them each layer has. Both sides keep them:
the source to refuse a part that overlaps, leaves a gap or comes after the last one; the destination because it believes
nothing unchecked.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvgrpc.core.chunks import Chunk
from kvgrpc.core.descriptors import Ids, holds
from kvgrpc.core.events import LayerRange
from kvgrpc.core.layout import Group, PoolLayout
from kvgrpc.core.pins import Blocks
from kvgrpc.errors import InvalidRequest, PreconditionFailed, Reason


@dataclass(frozen=True, eq=False)
class Part:
    """One part: for each group the blocks from position `starts[group]` on, in `layers` (None: all)."""

    number: int
    starts: tuple[int, ...]
    blocks: Blocks
    fresh: Blocks
    """Those of them that no earlier part has, in other layers."""
    layers: LayerRange | None
    last: bool
    after_step: int = 0


class Parts:
    """The parts of one epoch, of a prompt of `tokens` tokens in the pool of the source."""

    def __init__(self, pool: PoolLayout, tokens: int) -> None:
        self.tokens = tokens
        self._pool = pool
        self._parts: list[Part] = []
        self._table: list[Ids] = [np.empty(0, dtype=np.int64) for _ in pool.groups]
        """The blocks of each group, in token order."""
        self._handed = [np.zeros(group.layers, dtype=np.int64) for group in pool.groups]
        """How many of them each layer has."""

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def complete(self) -> bool:
        """The last part is there."""
        return bool(self._parts) and self._parts[-1].last

    @property
    def blocks(self) -> Blocks:
        """All blocks so far."""
        return tuple(self._table)

    def since(self, number: int) -> list[Part]:
        """The parts from that number on."""
        return self._parts[number:]

    def check(self, blocks: Blocks, layers: LayerRange | None, *, last: bool, after_step: int = 0) -> Part:
        """The next part, if it may be that; changes nothing.

        Raises InvalidRequest (INVALID_FIELD, BLOCK_DUPLICATE) or PreconditionFailed (CONTENT_RANGE,
        TRANSFER_ENDED after the last part). CONTENT_RANGE is also for a last part with something missing.
        """
        if self.complete:
            raise PreconditionFailed(Reason.TRANSFER_ENDED, "the last part of this push was handed over already")
        self._check_layers(layers)
        starts = tuple(self._start(i, ids, layers) for i, ids in enumerate(blocks))
        fresh = tuple(
            ids[max(len(table) - start, 0) :] for ids, table, start in zip(blocks, self._table, starts, strict=True)
        )
        part = Part(len(self._parts), starts, blocks, fresh, layers, last, after_step)
        if last:
            self._check_whole(part)
        return part

    def add(self, part: Part) -> None:
        """Takes a part that was checked."""
        assert part.number == len(self._parts), "a part is checked and taken in one step"
        self._parts.append(part)
        for i, ids in enumerate(part.fresh):
            if len(ids):
                self._table[i] = np.concatenate((self._table[i], ids))
        _cover(self._handed, self._pool.groups, part)

    def _check_layers(self, layers: LayerRange | None) -> None:
        if layers is None:
            return
        most = max(group.layers for group in self._pool.groups)
        if layers[0] < 0 or layers[1] < 1 or sum(layers) > most:
            raise InvalidRequest(Reason.INVALID_FIELD, f"layers {layers[0]} +{layers[1]} are not within the {most}")
        for region in self._pool.regions:
            holds(region, layers)

    def _start(self, i: int, ids: Ids, layers: LayerRange | None) -> int:
        """The position at which the blocks of a group go on."""
        group = self._pool.groups[i]
        first, end = _span(group, layers)
        handed = self._handed[i][first:end]
        if not len(ids):
            return 0
        if not len(handed):
            raise InvalidRequest(Reason.INVALID_FIELD, f"group {i} has none of these layers, but lists blocks")
        start = int(handed[0])
        known, new = self._table[i][start : start + len(ids)], ids[len(self._table[i]) - start :]
        same = (handed == start).all() and (known == ids[: len(known)]).all()
        if not same or (len(known) < len(ids) and len(self._table[i]) and np.isin(new, self._table[i]).any()):
            raise InvalidRequest(
                Reason.BLOCK_DUPLICATE,
                f"group {i}: the part overlaps earlier ones: its blocks must follow those of the same layers",
            )
        if start + len(ids) > group.blocks_of(self.tokens):
            raise PreconditionFailed(
                Reason.CONTENT_RANGE,
                f"group {i}: {start + len(ids)} blocks were handed over; {self.tokens} tokens fill "
                f"{group.blocks_of(self.tokens)}",
            )
        return start

    def _check_whole(self, part: Part) -> None:
        handed = [counts.copy() for counts in self._handed]
        _cover(handed, self._pool.groups, part)
        for i, (group, counts) in enumerate(zip(self._pool.groups, handed, strict=True)):
            needed = group.blocks_of(self.tokens)
            if (counts != needed).any():
                layer = int(np.argmax(counts != needed))
                raise PreconditionFailed(
                    Reason.CONTENT_RANGE,
                    f"group {i}: layer {layer} has {int(counts[layer])} of {needed} blocks after the last part",
                )


class Progress:
    """How far the parts of one epoch have moved to one destination, which takes the first `tokens` tokens."""

    def __init__(self, pool: PoolLayout, tokens: int) -> None:
        self._groups = pool.groups
        self._tokens = tokens
        self._moved = [np.zeros(group.layers, dtype=np.int64) for group in pool.groups]
        """How many blocks of each layer were settled."""
        self._settled = 0
        """How many parts were settled."""

    def settle(self, parts: Parts, count: int) -> None:
        """The first `count` parts have moved, and both sides held."""
        for part in parts.since(self._settled)[: count - self._settled]:
            _cover(self._moved, self._groups, part)
        self._settled = count

    @property
    def layers_done(self) -> tuple[LayerRange, ...]:
        """The layers of which every block has moved, as ranges."""
        done = np.ones(max(group.layers for group in self._groups), dtype=bool)
        for group, moved in zip(self._groups, self._moved, strict=True):
            done[: group.layers] &= moved >= group.blocks_of(self._tokens)
        edges = np.flatnonzero(np.diff(np.concatenate(([0], done.view(np.int8), [0]))))
        return tuple((int(first), int(end - first)) for first, end in zip(edges[::2], edges[1::2], strict=True))


def chunks_of(parts: Sequence[Part], source: PoolLayout, target: Blocks, tokens: int) -> list[Chunk]:
    """What these parts move into a target: of each group its last blocks of the first `tokens` tokens."""
    chunks = []
    for part in parts:
        cuts = [
            _cut(part.starts[i], part.blocks[i], target[i], group.blocks_of(tokens))
            for i, group in enumerate(source.groups)
        ]
        chunks.append(Chunk(tuple(c[0] for c in cuts), tuple(c[1] for c in cuts), part.layers))
    return chunks


def _cut(start: int, ids: Ids, target: Ids, end: int) -> tuple[Ids, Ids]:
    """The blocks of a part that the target takes, and where it takes them."""
    skip = end - len(target)
    low, high = max(start, skip), min(start + len(ids), end)
    if low >= high:
        return ids[:0], target[:0]
    return ids[low - start : high - start], target[low - skip : high - skip]


def _span(group: Group, layers: LayerRange | None) -> LayerRange:
    """First and end of the layers of a group that a range names."""
    if layers is None:
        return 0, group.layers
    return min(layers[0], group.layers), min(sum(layers), group.layers)


def _cover(counts: list[Ids], groups: Sequence[Group], part: Part) -> None:
    for i, ids in enumerate(part.blocks):
        if len(ids):
            first, end = _span(groups[i], part.layers)
            counts[i][first:end] = part.starts[i] + len(ids)
