"""Random pairs of engines that serve one model with different ranks, stages, blocks, element orders and memory places.

A model has groups of each kind. For some groups the inside of blocks is unknown, or known for heads only: both engines
then lay them out alike as far as they must. Each engine chooses the rest: which groups share a block space, and whether
the blocks of a space's regions share one row or have rows of their own.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, groupby, zip_longest
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from kvgrpc.core.values.bridge import Bridge, BridgeSide
from kvgrpc.core.values.chunks import Chunk
from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout, Region, Section, Strides, TensorKind
from tests.core.split_kv import ALL_TOKENS, Held, SplitKV

DIM, TOKENS = 4, 24
"""Elements of a head, one byte each; number of tokens of the longest prompt."""
STATE_BYTES = 56
STATE_SECTIONS = 24, 5, 12
"""Bytes of each section of a state over all ranks, for states whose sections are known."""
FULL, WINDOW, MLA, STATE = (GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW, GroupKind.MLA, GroupKind.STATE)
BLOCK_TOKENS = [(4, 4), (4, 8), (8, 4), (12, 4), (4, 12), (8, 8)]
TOGETHER = {MLA: [(TensorKind.LATENT,)], STATE: [(TensorKind.STATE,)]}
"""Tensors that regions of the same layers hold, as choices."""
KEYS_AND_VALUES = [(TensorKind.KV,), (TensorKind.K, TensorKind.V)]


class Layers(NamedTuple):
    """One group of the model."""

    kind: GroupKind
    layers: int
    heads: int
    window: int
    inside: str
    """Known structure inside blocks: "tokens", "heads", "sections" or "nothing"."""
    block_tokens: tuple[int, int]
    """Tokens of a block at the source and at the destination."""
    order: str
    cuts: list[tuple[int, int]]
    """Layer ranges of regions, where engines cannot choose them."""
    tensors: tuple[TensorKind, ...]

    @property
    def binds_ranks(self) -> bool:
        """Tells whether both engines need the same number of ranks."""
        return self.inside == "nothing" and self.kind is not MLA

    def fits(self, ranks: int) -> bool:
        """Tells whether `ranks` ranks can split the heads evenly, or the heads can be repeated evenly over them."""
        return self.kind in (MLA, STATE) or 0 in (self.heads % ranks, ranks % self.heads)


class Choice(NamedTuple):
    """The choices that an engine makes once for all groups."""

    ranks: int
    """Ranks of each stage."""
    stages: int
    alias: bool
    in_rows: bool


class Listed(NamedTuple):
    """The blocks that one engine lists for a group."""

    blocks: list[int]
    begin: int


class Move(NamedTuple):
    """A source, a destination, and the blocks that each lists."""

    source: SplitKV
    destination: SplitKV
    given: list[Listed]
    taken: list[Listed]
    tokens: int
    """Length of the prompt of which the source lists all blocks and the destination the last ones of each group; 0 if
    both list some in the middle.
    """

    def bridge(self, run_bytes_min: int) -> Bridge:
        return Bridge(self.source.side, self.destination.side, run_bytes_min)

    @property
    def chunk(self) -> Chunk:
        """Returns all listed blocks of both sides as one chunk."""
        here, there = (
            tuple(np.array(some.blocks, dtype=np.int64) for some in side) for side in (self.given, self.taken)
        )
        begins = tuple((a.begin, b.begin) for a, b in zip(self.given, self.taken, strict=True))
        return Chunk(here, there, None, begins)

    def fill(self) -> None:
        """Clears both memories, and fills the blocks that the source lists."""
        self.source.clear()
        self.destination.clear()
        for group, some in enumerate(self.given):
            self.source.fill(some.blocks, some.begin, group=group)

    def common(self, group: int) -> range:
        """Returns the tokens whose blocks both sides list; for a state, all tokens."""
        sides = (self.source, self.given[group]), (self.destination, self.taken[group])
        groups = [side.side.pool.groups[group] for side, _ in sides]
        if groups[0].kind is STATE:
            return ALL_TOKENS
        ends = [some.begin + len(some.blocks) * of.block_tokens for (_, some), of in zip(sides, groups, strict=True)]
        return range(max(some.begin for _, some in sides), min(ends))

    def check(self) -> None:
        """Asserts that the destination has all that both sides list, and that nothing else was written there."""
        held = [Held(some.blocks, self.common(i), some.begin, i) for i, some in enumerate(self.taken)]
        assert not self.tokens or all(some.tokens for some in held), "the end of a prompt is on both sides"
        self.destination.check_all([some for some in held if some.tokens])


def _cuts(draw: st.DrawFn, layers: int) -> list[tuple[int, int]]:
    """Draws a split of the layers into runs, as (first, count)."""
    ends = [layer for layer in range(1, layers) if draw(st.booleans())] + [layers]
    return [(first, end - first) for first, end in zip([0, *ends], ends, strict=False)]


@st.composite
def models(draw: st.DrawFn) -> list[Layers]:
    found = []
    for kind in draw(st.sampled_from(KINDS)):
        insides = {STATE: ["nothing", "sections"], MLA: ["tokens", "tokens", "nothing"]}
        layers = draw(st.integers(1, 3))
        inside = draw(st.sampled_from(insides.get(kind, ["tokens", "tokens", "tokens", "heads", "nothing"])))
        sizes = draw(st.sampled_from(BLOCK_TOKENS))
        found.append(
            Layers(
                kind,
                layers,
                draw(st.sampled_from([1, 2, 4, 6, 8])),
                draw(st.sampled_from([1, 5, 8, 13])) if kind is WINDOW else 0,
                inside,
                sizes if inside == "tokens" or kind is STATE else (sizes[0], sizes[0]),
                draw(st.sampled_from(["token_major", "head_major"])),
                _cuts(draw, layers),
                draw(st.sampled_from(TOGETHER.get(kind, KEYS_AND_VALUES))),
            )
        )
    return found


KINDS = [[FULL], [MLA], [FULL], [WINDOW, FULL], [FULL, WINDOW, WINDOW], [STATE, FULL], [MLA, STATE], [MLA, FULL]]
"""Kinds of the groups of a model, as choices."""


def _strides(draw: st.DrawFn, some: Layers, group: Group, tensor: TensorKind) -> tuple[Strides | None, int]:
    """Draws the places of elements in a region's blocks, and returns them with the bytes of a layer."""
    parts = 2 if tensor is TensorKind.KV else 1
    heads, tokens, run = group.kv_heads, group.block_tokens, parts * DIM
    if some.kind is STATE:  # a state has the same size for any number of tokens
        return None, sum(section.nbytes for section in group.sections) or STATE_BYTES
    whole = heads * tokens * run
    if some.inside == "nothing":
        return None, whole
    gap = draw(st.sampled_from([0, 0, 3]))
    if some.inside == "heads":
        head = tokens * run + gap
        return Strides(heads * head, 0, head, 0), heads * head
    if tensor in {TensorKind.KV, TensorKind.K} and draw(st.integers(0, 2)) == 0:  # keys in columns, as on CPUs
        column, row = tokens + gap, DIM + gap
        part = max(DIM * column, tokens * row)
        return Strides(heads * parts * part, part, parts * part, row, column), heads * parts * part
    # Some engines store keys and values of a token side by side; a gap may follow.
    side_by_side = Strides(heads * tokens * (run + gap), DIM, tokens * (run + gap), run + gap)
    if draw(st.booleans()):
        return side_by_side, heads * tokens * (run + gap)
    return None, whole


def _group(some: Layers, name: str, choice: Choice, which: int, order: str, blocks: int) -> Group:
    alone = some.kind in (MLA, STATE)
    return Group(
        name,
        some.kind,
        some.layers,
        some.block_tokens[which],
        blocks,
        1 if alone else max(some.heads // choice.ranks, 1),
        DIM,
        "of its own" if some.inside == "nothing" else "uint8",
        order,
        some.window,
        0 if alone else some.heads,
        "shared" if choice.alias else "",
        tuple(_section(total, choice.ranks) for total in STATE_SECTIONS) if some.inside == "sections" else (),
    )


def _section(total_bytes: int, ranks: int) -> Section:
    """Returns a rank's section: an equal share, or the whole where the bytes do not divide evenly."""
    return Section(total_bytes // ranks if total_bytes % ranks == 0 else total_bytes, total_bytes)


def _regions(draw: st.DrawFn, some: Layers, index: int, group: Group, stages: int) -> list[Region]:
    """Draws the regions of one group, still without offsets."""
    found = []
    cuts = [(layer, 1) for layer in range(some.layers)] if some.inside == "sections" else _cuts(draw, some.layers)
    for first, count in some.cuts if some.inside == "nothing" else cuts:
        stage = draw(st.integers(0, stages - 1))
        free = TOGETHER.get(some.kind, KEYS_AND_VALUES)
        for tensor in draw(st.sampled_from(free)) if some.inside == "tokens" else some.tensors:
            strides, nbytes = _strides(draw, some, group, tensor)
            found.append(Region(index, first, count, 0, nbytes * count, nbytes * count, tensor, strides, stage))
    return found


def _placed(regions: Sequence[Region], blocks: int, begin: int, gap: int, *, in_rows: bool) -> list[Region]:
    """Places the regions of one space in one stage. With `in_rows`, a group's blocks in all regions form one row;
    otherwise each region, with the aliased ones of other groups, has rows of its own.
    """
    rows = [list(some) for _, some in groupby(regions, key=lambda region: region.group)]
    found = []
    if in_rows:
        stride = gap + max(sum(region.block_bytes for region in row) for row in rows)
        for row in rows:
            at = [begin, *(begin + end for end in accumulate(region.block_bytes for region in row))]
            found += [replace(r, offset=here, stride_bytes=stride) for r, here in zip(row, at, strict=False)]
        return found
    for aliased in zip_longest(*rows):
        some = [region for region in aliased if region is not None]
        stride = gap + max(region.block_bytes for region in some)
        found += [replace(region, offset=begin, stride_bytes=stride) for region in some]
        begin += blocks * stride + gap
    return found


def _engine(draw: st.DrawFn, model: Sequence[Layers], which: int, ranks: int) -> SplitKV:
    choice = Choice(ranks, draw(st.sampled_from([1, 1, 2, 3])), draw(st.booleans()), draw(st.booleans()))
    needed = [1 if some.kind is STATE else TOKENS // some.block_tokens[which] for some in model]
    groups, unplaced = [], []
    for i, (some, count) in enumerate(zip(model, needed, strict=True)):
        order = some.order if some.inside != "tokens" else draw(st.sampled_from(["token_major", "head_major"]))
        blocks = (sum(needed) if choice.alias else count) + 3
        groups.append(_group(some, str(i), choice, which, order, blocks))
        unplaced += _regions(draw, some, i, groups[i], choice.stages)
    numbers = sorted({region.stage for region in unplaced})
    unplaced = [replace(region, stage=numbers.index(region.stage)) for region in unplaced]
    regions, total = [], 0
    for stage in range(len(numbers)):
        mine, begin = [region for region in unplaced if region.stage == stage], 0
        for space in [range(len(groups))] if choice.alias else [range(i, i + 1) for i in range(len(groups))]:
            here, blocks = [region for region in mine if region.group in space], groups[space.start].blocks
            gap = draw(st.sampled_from([0, 5]))
            placed = _placed(here, blocks, begin, gap, in_rows=choice.in_rows) if here else []
            begin = max([begin, *(r.offset + blocks * r.stride_bytes for r in placed)]) + gap
            regions += placed
        total = max(total, begin)
    pool = PoolLayout(tuple(groups), tuple(regions), total)
    return SplitKV(BridgeSide(pool, ranks * pool.stages))


def _listed(draw: st.DrawFn, side: SplitKV, tokens: int, *, from_first: bool, to_last: bool) -> list[Listed]:
    """Draws blocks of each group for a part of a prompt; no block of a space belongs to two groups."""
    pool, found = side.side.pool, []
    free = [list(draw(st.permutations(range(group.blocks)))) for group in pool.groups]
    for i, group in enumerate(pool.groups):
        first, count = group.first_of(tokens), group.blocks_of(tokens)
        skipped = 0 if from_first else draw(st.integers(0, min(count - 1, 2)))
        count = count - skipped if to_last else draw(st.integers(1, count - skipped))
        mine = free[pool.spaces[i]]
        blocks, free[pool.spaces[i]] = mine[:count], mine[count:]
        found.append(Listed(blocks, 0 if group.kind is STATE else (first + skipped) * group.block_tokens))
    return found


@st.composite
def moves(draw: st.DrawFn) -> Move:
    """Draws two engines that can exchange blocks, and the blocks of a prompt's parts on each side."""
    model = draw(models())
    fitting = [ranks for ranks in range(1, 5) if all(some.fits(ranks) for some in model)]
    ranks = [draw(st.sampled_from(fitting)) for _ in range(2)]
    if any(some.binds_ranks for some in model):
        ranks[1] = ranks[0]
    sides = [_engine(draw, model, which, ranks[which]) for which in range(2)]
    tokens, to_last = draw(st.integers(1, TOKENS)), draw(st.booleans())
    given = _listed(draw, sides[0], tokens, from_first=to_last, to_last=to_last)
    taken = _listed(draw, sides[1], tokens, from_first=False, to_last=to_last)
    return Move(sides[0], sides[1], given, taken, tokens if to_last else 0)
