"""The parts of a push: what its source has handed over, block by block and layer by layer.

Parts of one epoch have no order between layers. Within a layer each part continues where the one before stopped. So two
numbers say all: the blocks of each group in token order, and how many of them each layer has. Both sides keep them. The
source refuses a part that overlaps, leaves a gap or comes after the last one; the destination checks all that it is
told. A block is listed by one part; other parts refer to it by its position.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvgrpc.core.values.block_ids import (
    NO_IDS,
    Blocks,
    Ids,
    Kept,
    check_ids,
    check_spaces,
    kept_bytes,
    no_blocks,
    pack,
    unpack,
)
from kvgrpc.core.values.bridge import Bridge
from kvgrpc.core.values.call import LayerRange, ReadyPart
from kvgrpc.core.values.chunks import Chunk
from kvgrpc.core.values.layout import Group, PoolLayout
from kvgrpc.core.values.records import dataclass
from kvgrpc.errors import InvalidRequest, KVGrpcError, PreconditionFailed, Reason, invalid, too_many

PARTS_MAX = 16_384
"""Maximum number of parts of one epoch: 128 layers in 128 pieces."""
SPANS_MAX = 131_072
"""Maximum number of rows over all parts, one for each group of a part."""
BATCH_PARTS = 512
"""Maximum number of parts in one call between leads, and in one round of bytes. More would block event loops."""
BATCH_SPANS = 4_096
"""Maximum number of rows in such a batch, unless one part alone has more."""
FEW_BLOCKS = 4_096
"""Number of a group's blocks up to which they are kept as ids, since each part reads them."""
PARTS_BYTES = 1_600
"""Bytes of an epoch beside its parts and blocks."""
PART_BYTES = 320
SPAN_BYTES = 120


class PartSpan(NamedTuple):
    """A row of a part: `length` blocks of a group from position `start` on. No earlier part lists the last `new`."""

    group: int
    start: int
    length: int
    new: int


@dataclass(frozen=True, eq=False)
class Part:
    """One part: blocks of some groups, in `layers` (None: all)."""

    number: int
    spans: tuple[PartSpan, ...]
    layers: LayerRange | None
    last: bool
    after_step: int = 0


class Parts:
    """The parts of one epoch, for a prompt of `tokens` tokens in the source's pool and at most `most` blocks in all."""

    def __init__(self, pool: PoolLayout, tokens: int, most: int) -> None:
        self.tokens = tokens
        self._pool = pool
        self._most = most
        self._parts: list[Part] = []
        self._spans = 0
        self._kept: Kept = no_blocks(len(pool.groups))
        """Blocks of each group, in token order."""
        self._handed = [np.zeros(group.layers, dtype=np.int64) for group in pool.groups]
        """Per group, the number of blocks that each layer has."""
        self._sound: set[LayerRange] = set()
        """Layer ranges of earlier parts, which were checked: none cuts a region."""

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def complete(self) -> bool:
        """True if the last part has been handed over."""
        return bool(self._parts) and self._parts[-1].last

    @property
    def blocks(self) -> Blocks:
        """Blocks of each group that were handed over so far."""
        return unpack(self._kept)

    @property
    def kept_bytes(self) -> int:
        """Bytes of memory that the epoch takes."""
        rows = PARTS_BYTES + PART_BYTES * len(self._parts) + SPAN_BYTES * self._spans
        return rows + kept_bytes(self._kept) + sum(counts.nbytes for counts in self._handed)

    def between(self, number: int, end: int) -> list[Part]:
        """Returns the parts from `number` up to `end`, without `end`."""
        return self._parts[number:end]

    def batch(self, number: int) -> list[Part]:
        """Returns the parts from `number` on that fit into one call between leads or one round of bytes."""
        spans = 0
        found = self._parts[number : number + BATCH_PARTS]
        for i, part in enumerate(found):
            spans += len(part.spans)
            if i and spans > BATCH_SPANS:
                return found[:i]
        return found

    def listed(self, parts: Sequence[Part]) -> Blocks:
        """Returns the blocks that these consecutive parts are the first to list."""
        table = self.blocks
        firsts, counts = [0] * len(table), [0] * len(table)
        for part in parts:
            for group, start, count, new in part.spans:
                if new and not counts[group]:
                    firsts[group] = start + count - new
                counts[group] += new
        return tuple(ids[first : first + count] for ids, first, count in zip(table, firsts, counts, strict=True))

    def row(self, part: Part) -> ReadyPart:
        """Returns the row by which the source tells a peer of a part."""
        known = [0] * (max((span.group for span in part.spans), default=-1) + 1)
        for group, _, count, new in part.spans:
            known[group] = count - new
        while known and not known[-1]:
            known.pop()
        blocks = tuple((i, ids) for i, ids in enumerate(self.listed([part])) if len(ids))
        return ReadyPart(part.number, blocks, tuple(known), part.layers, part.last)

    def check(self, blocks: Blocks, layers: LayerRange | None, *, last: bool, after_step: int = 0) -> Part:
        """Checks the next part and returns it; changes nothing. `blocks` are all blocks of the part, also known ones.

        Raises InvalidRequest (INVALID_FIELD, BLOCK_DUPLICATE), OutOfRange (LIMIT_EXCEEDED) or PreconditionFailed
        (CONTENT_RANGE, TRANSFER_ENDED after the last part). CONTENT_RANGE is also raised for a last part with something
        missing.
        """
        self._check_goes_on(layers)
        known, listed = [], self.blocks
        for i, (ids, table) in enumerate(zip(blocks, listed, strict=True)):
            start = self._start(i, layers) if len(ids) else 0
            there = table[start : start + len(ids)]
            new = ids[len(there) :]
            if not (there == ids[: len(there)]).all() or (len(new) and len(table) and np.isin(new, table).any()):
                raise _overlaps(i)
            known.append(len(there))
        self._check_spaces(blocks, known, listed)
        new_counts = [len(ids) - count for ids, count in zip(blocks, known, strict=True)]
        return self._checked(known, new_counts, layers, listed, last=last, after_step=after_step)

    def add(self, part: Part, blocks: Blocks) -> None:
        """Adds a checked part. `blocks` are per group; the last ones of each group are new."""
        table = list(self.blocks)
        self._add(part, blocks, table)
        if any(span.new for span in part.spans):
            self._kept = pack(tuple(table), FEW_BLOCKS)

    def _add(self, part: Part, blocks: Blocks, table: list[Ids]) -> None:
        assert part.number == len(self._parts), "a part is checked and taken in one step"
        self._parts.append(part)
        self._spans += len(part.spans)
        if part.layers is not None:
            self._sound.add(part.layers)
        for group, _, _, new in part.spans:
            if new:
                table[group] = np.concatenate((table[group], blocks[group][-new:]))
        _cover(self._handed, self._pool.groups, part)

    def extend(self, rows: Sequence[ReadyPart]) -> None:
        """Adds parts as their source states them, all or none. Raises what `check` raises, OutOfRange
        (BLOCK_OUT_OF_RANGE) and InvalidRequest (GROUP_MISMATCH).
        """
        count, spans, before = len(self._parts), self._spans, self.blocks
        table = list(before)
        handed = [counts.copy() for counts in self._handed]
        try:
            for row in rows:
                self._take(row, table)
            for i, (known, ids) in enumerate(zip(before, table, strict=True)):
                if len(ids) > len(known):
                    check_ids(ids, self._pool.groups[i].blocks, f"parts, group {i}", group=i)
            check_spaces(table, self._pool, "parts")
        except KVGrpcError:
            del self._parts[count:]
            self._spans, self._handed = spans, handed
            raise
        self._kept = pack(tuple(table), FEW_BLOCKS)

    def chunks(self, parts: Sequence[Part], target: Blocks, tokens: int, bridge: Bridge) -> list[Chunk]:
        """Returns the chunks that these parts move into `target`: per group its last blocks of the first `tokens`."""
        table = self.blocks
        nothing = [NO_IDS] * len(table)
        begins = [bridge.begins(group, tokens, len(ids)) for group, ids in enumerate(target)]
        found = []
        for part in parts:
            source, at = nothing.copy(), begins.copy()
            for group, start, count, _ in part.spans:
                source[group] = table[group][start : start + count]
                at[group] = begins[group][0] + start * self._pool.groups[group].block_tokens, begins[group][1]
            found.append(bridge.trimmed(Chunk(tuple(source), target, part.layers, tuple(at))))
        return found

    def _take(self, row: ReadyPart, table: list[Ids]) -> None:
        groups = len(table)
        if row.number != len(self._parts):
            raise InvalidRequest(Reason.INVALID_FIELD, f"part {len(self._parts)} comes before part {row.number}")
        blocks = [NO_IDS] * groups
        for group, ids in row.blocks:
            if not 0 <= group < groups or len(blocks[group]):
                wrong = "is listed twice" if group < groups else f"does not exist; the pool has {groups}"
                raise InvalidRequest(Reason.GROUP_MISMATCH, f"part {row.number}: group {group} {wrong}")
            blocks[group] = ids
        if len(row.known) > groups:
            raise InvalidRequest(Reason.GROUP_MISMATCH, f"part {row.number} knows {len(row.known)} groups of {groups}")
        self._check_goes_on(row.layers)
        known = [*row.known, *[0] * (groups - len(row.known))]
        part = self._checked(known, [len(ids) for ids in blocks], row.layers, table, last=row.last)
        self._add(part, tuple(blocks), table)

    def _checked(
        self, known: Sequence[int], new: Sequence[int], layers: LayerRange | None, table: Sequence[Ids], *, last: bool,
        after_step: int = 0,
    ) -> Part:  # fmt: skip
        """Returns the next part, with `known` blocks that earlier parts list and `new` others per group."""
        spans = []
        for i, (there, others) in enumerate(zip(known, new, strict=True)):
            if there or others:
                start, listed = self._start(i, layers), len(table[i])
                self._check_end(i, start + there + others)
                if start + there > listed or (others and start + there < listed):
                    raise _overlaps(i)
                spans.append(PartSpan(i, start, there + others, others))
        if not spans and not last:
            raise InvalidRequest(Reason.INVALID_FIELD, f"part {len(self._parts)} has no blocks")
        self._check_room(len(spans), sum(map(len, table)) + sum(new))
        part = Part(len(self._parts), tuple(spans), layers, last, after_step)
        if last:
            self._check_whole(part)
        return part

    def _check_spaces(self, blocks: Blocks, known: Sequence[int], table: Sequence[Ids]) -> None:
        """Raises InvalidRequest (BLOCK_DUPLICATE) for a new block that another group of its space has."""
        for groups in self._pool.shared_spaces:
            for i in groups:
                new, others = blocks[i][known[i] :], [table[other] for other in groups if other != i]
                if len(new) and np.isin(new, np.concatenate(others)).any():
                    raise _overlaps(i)

    def _check_room(self, spans: int, total: int) -> None:
        if total > self._most:
            raise too_many(f"{total} blocks in one push; the limit is {self._most}", self._most)
        if len(self._parts) >= PARTS_MAX or self._spans + spans > SPANS_MAX:
            raise too_many(f"a push has at most {PARTS_MAX} parts, which list {SPANS_MAX} groups in all", PARTS_MAX)

    def _check_goes_on(self, layers: LayerRange | None) -> None:
        """Raises an error unless a part of these layers may follow."""
        if self.complete:
            raise PreconditionFailed(Reason.TRANSFER_ENDED, "the last part of this push was handed over already")
        if layers is None or layers in self._sound:
            return
        most = max(group.layers for group in self._pool.groups)
        if layers[0] < 0 or layers[1] < 1 or sum(layers) > most:
            raise invalid("part.layers", f"{layers[0]} +{layers[1]} are not within the {most} of the pool")
        for region in self._pool.regions:
            region.holds(layers)

    def _start(self, i: int, layers: LayerRange | None) -> int:
        """Returns the position at which the blocks of a group continue."""
        first, end = _span(self._pool.groups[i], layers)
        handed = self._handed[i][first:end]
        if not len(handed):
            raise invalid("blocks.groups", f"list no block of group {i}, which has none of these layers")
        start = int(handed[0])
        if not (handed == start).all():
            raise _overlaps(i)
        return start

    def _check_end(self, i: int, end: int) -> None:
        most = self._pool.groups[i].blocks_of(self.tokens)
        if end > most:
            raise PreconditionFailed(
                Reason.CONTENT_RANGE, f"group {i}: {end} blocks were handed over; {self.tokens} tokens fill {most}"
            )

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
    """Progress of the parts of one epoch to one destination, which takes the first `tokens` tokens."""

    def __init__(self, pool: PoolLayout, tokens: int) -> None:
        self._groups = pool.groups
        self._tokens = tokens
        self._moved = [np.zeros(group.layers, dtype=np.int64) for group in pool.groups]
        """Per group, the number of blocks of each layer that are settled."""
        self._settled = 0
        """Number of settled parts."""

    def settle(self, parts: Parts, count: int) -> None:
        """Records that the first `count` parts have moved, and that both sides settled them as valid."""
        for part in parts.between(self._settled, count):
            _cover(self._moved, self._groups, part)
        self._settled = count

    @property
    def layers_done(self) -> tuple[LayerRange, ...]:
        """Ranges of layers whose blocks have all moved."""
        done = np.ones(max(group.layers for group in self._groups), dtype=bool)
        for group, moved in zip(self._groups, self._moved, strict=True):
            done[: group.layers] &= moved >= group.blocks_of(self._tokens)
        edges = np.flatnonzero(np.diff(np.concatenate(([0], done.view(np.int8), [0]))))
        return tuple((int(first), int(end - first)) for first, end in zip(edges[::2], edges[1::2], strict=True))


def _overlaps(group: int) -> InvalidRequest:
    return InvalidRequest(
        Reason.BLOCK_DUPLICATE,
        f"group {group}: the part overlaps earlier ones: its blocks must follow those of the same layers",
    )


def _span(group: Group, layers: LayerRange | None) -> LayerRange:
    """Returns first and end of a group's layers that a range names."""
    if layers is None:
        return 0, group.layers
    return min(layers[0], group.layers), min(sum(layers), group.layers)


def _cover(counts: list[Ids], groups: Sequence[Group], part: Part) -> None:
    for group, start, count, _ in part.spans:
        first, end = _span(groups[group], part.layers)
        counts[group][first:end] = start + count
