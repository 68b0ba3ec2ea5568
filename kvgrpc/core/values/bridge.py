"""From blocks of a source to blocks of a destination that may be split and laid out in another way: who moves what.

A bridge is made of two engines' pools. It says which pairs of ranks move bytes, and for lists of blocks which runs each
pair copies. Where runs are long enough they are copied as they are. Where they are not, the destination reads whole
blocks into a staging buffer and copies what it needs from there.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from kvgrpc.core.values.calls import LayerRange
from kvgrpc.core.values.chunks import Chunk, Size
from kvgrpc.core.values.descriptors import Ids, Runs, check_ids, holds
from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout
from kvgrpc.core.values.patterns import Pattern, patterns_of, unit_tokens
from kvgrpc.core.values.plans import Draft, Pair, PairRuns, Units, list_runs, regions_of, stage
from kvgrpc.core.values.strips import Repack
from kvgrpc.core.values.views import Share, shares
from kvgrpc.errors import InvalidRequest, Reason

RUN_BYTES_MIN = 2_048
"""Shorter runs take longer one by one, over cma and nixl, than twice their bytes in whole blocks and a re-pack:
docs/performance.md has the figures.
"""
STAGING_BYTES = 64 << 20
"""The staging buffer of a rank."""
STAGED_AT_ONCE_BYTES = STAGING_BYTES // 4
"""What one posting reads into it, unless one block alone has more: others move meanwhile."""
MAPPED = frozenset({"shm"})
"""Data paths by which ranks map their peers' memory: what is re-packed is copied straight out of it."""


def repacked_at_once(data_paths: Iterable[str]) -> int:
    """Bytes of one posting that ends with a re-pack, by these data paths: what needs no staging buffer holds up no
    other posting.
    """
    return STAGING_BYTES if MAPPED.issuperset(data_paths) else STAGED_AT_ONCE_BYTES


class Side(NamedTuple):
    """What a bridge is made of, of each engine."""

    pool: PoolLayout
    ranks: int

    @property
    def stage_ranks(self) -> int:
        """Ranks of each pipeline stage, which share heads among them."""
        return self.ranks // self.pool.stages


class Bridge:
    """How blocks of a source become blocks of a destination. The two were found compatible."""

    def __init__(self, source: Side, destination: Side, run_bytes_min: int = RUN_BYTES_MIN) -> None:
        self._source = source
        self._destination = destination
        self._run_bytes_min = run_bytes_min
        self._shares: dict[Pair, list[tuple[int, Share]]] = {}
        self._kinds: list[dict[Share, None]] = [{} for _ in source.pool.groups]
        """For each group the shares that pairs have, each once where they move the same."""
        for group, share in self._all_shares():
            self._shares.setdefault(Pair(share.rank, share.source_rank), []).append((group, share))
            self._kinds[group][_alike(share)] = None
        self.pairs = tuple(sorted(self._shares))
        self._patterns: dict[tuple[int, Share], list[Pattern]] = {}
        self._sizes: dict[tuple[int, LayerRange | None], Size] = {}
        self._arriving: dict[tuple[int, LayerRange | None], list[int]] = {}
        self._unit_tokens = [unit_tokens(here, there) for here, there in self._groups()]

    @cached_property
    def repacked(self) -> frozenset[int]:
        """The groups whose runs are too short to be moved one by one."""
        return frozenset(
            group
            for group in range(len(self._kinds))
            if any(pattern.dimensions and pattern.run_bytes < self._run_bytes_min for pattern in self._of_group(group))
        )

    def run_bytes(self, group: int) -> int:
        """The shortest run of a group's blocks."""
        return min(pattern.run_bytes for pattern in self._of_group(group))

    def cuts_blocks(self, group: int) -> bool:
        """Whether some of what is moved of a group is less than a region's whole block."""
        return any(pattern.run_bytes < pattern.source.block_bytes for pattern in self._of_group(group))

    def bytes_of_block(self, group: int) -> int:
        """Bytes that arrive with `block_tokens` tokens of a group in a rank of the destination, the one with most."""
        return self.block_tokens(group) // self._unit_tokens[group] * max(self._bytes_of_unit(group, None))

    def bytes_of(self, chunks: Sequence[Chunk]) -> int:
        """Bytes that arrive in all ranks of the destination."""
        return sum(
            len(self.extent(chunk, group)) // self._unit_tokens[group] * sum(self._bytes_of_unit(group, chunk.layers))
            for chunk in chunks
            for group in range(len(chunk.source))
            if self.extent(chunk, group)
        )

    def _bytes_of_unit(self, group: int, layers: LayerRange | None) -> list[int]:
        """Bytes that arrive in each rank of the destination with a unit of tokens of a group, in some layers."""
        key = group, layers
        if key not in self._arriving:
            arriving = [0] * self._destination.ranks
            for pair in self.pairs:
                for share in (share for of, share in self._shares[pair] if of == group):
                    arriving[pair.rank] += sum(pattern.nbytes for pattern in self._within(group, share, layers))
            self._arriving[key] = arriving
        return self._arriving[key]

    def block_tokens(self, group: int) -> int:
        """Tokens that are never split between postings: those of the larger one of both sides' blocks."""
        source, destination = self._source.pool.groups[group], self._destination.pool.groups[group]
        return max(source.block_tokens, _tokens(source, destination))

    def size_of_block(self, group: int, layers: LayerRange | None) -> Size:
        """What `block_tokens` tokens of a group cost a rank of the destination, in some layers: the bytes that it
        reads, with what it only reads to pick from, and the runs, over all its pairs. That of the rank with most, which
        reads from more ranks than others do.
        """
        key = group, layers
        if key not in self._sizes:
            each: dict[Share, tuple[int, int]] = {}
            ranks: dict[int, tuple[int, int]] = {}
            for pair in self.pairs:
                for share in (share for of, share in self._shares[pair] if of == group):
                    alike = _alike(share)
                    if alike not in each:
                        each[alike] = self._cost(group, self._within(group, share, layers))
                    nbytes, runs = ranks.get(pair.rank, (0, 0))
                    ranks[pair.rank] = nbytes + each[alike][0], runs + each[alike][1]
            self._sizes[key] = Size(max(row[0] for row in ranks.values()), 1, max(row[1] for row in ranks.values()))
        return self._sizes[key]

    def _cost(self, group: int, found: Sequence[Pattern]) -> tuple[int, int]:
        """Bytes and runs that are moved with `block_tokens` tokens for these patterns."""
        tokens = self.block_tokens(group)
        if group in self.repacked:
            regions, blocks = regions_of(found), tokens // self._source.pool.groups[group].block_tokens
            return blocks * sum(region.block_bytes for region in regions), max(blocks * len(regions), len(found))
        units = tokens // self._unit_tokens[group]
        return units * sum(pattern.nbytes for pattern in found), units * sum(pattern.runs for pattern in found)

    def size_of(self, chunks: Sequence[Chunk]) -> Size:
        """What all of the chunks cost each rank of the destination."""
        nbytes = blocks = runs = 0
        for chunk in chunks:
            for group in range(len(chunk.source)):
                extent, tokens = self.extent(chunk, group), self.block_tokens(group)
                if extent:
                    count = -(-extent.stop // tokens) - extent.start // tokens
                    each = self.size_of_block(group, chunk.layers)
                    nbytes, blocks, runs = nbytes + count * each.nbytes, blocks + count, runs + count * each.runs
        return Size(nbytes, blocks, runs)

    def stages(self, chunks: Sequence[Chunk]) -> bool:
        """Whether some of the chunks is re-packed."""
        return any(self.extent(chunk, group) for chunk in chunks for group in self.repacked)

    def extent(self, chunk: Chunk, group: int) -> range:
        """The tokens whose blocks both sides list."""
        source, destination = self._source.pool.groups[group], self._destination.pool.groups[group]
        src_begin, dst_begin = chunk.begins[group] if chunk.begins else (0, 0)
        src_end = src_begin + len(chunk.source[group]) * source.block_tokens
        dst_end = dst_begin + len(chunk.destination[group]) * _tokens(source, destination)
        return range(max(src_begin, dst_begin), min(src_end, dst_end))

    def begins(self, group: int, tokens: int, blocks: int) -> tuple[int, int]:
        """Where the lists of blocks begin of a prompt of `tokens` tokens: the source's, which lists all of them, and
        the destination's, which lists the last `blocks`.
        """
        source, destination = self._source.pool.groups[group], self._destination.pool.groups[group]
        if source.kind is GroupKind.STATE:
            return 0, 0
        held = destination.blocks_of(tokens) - blocks
        return (
            source.first_of(tokens) * source.block_tokens,
            (destination.first_of(tokens) + held) * destination.block_tokens,
        )

    def part(self, chunk: Chunk, group: int, tokens: range) -> Chunk:
        """What a chunk moves of some tokens of one group."""
        return self._cut(chunk, [tokens if i == group else range(0) for i in range(len(chunk.source))])

    def trimmed(self, chunk: Chunk) -> Chunk:
        """A chunk without the blocks that only one side lists."""
        return self._cut(chunk, [self.extent(chunk, group) for group in range(len(chunk.source))])

    def _cut(self, chunk: Chunk, tokens: Sequence[range]) -> Chunk:
        """Of each group the blocks of some tokens."""
        cut = []
        for group, (source, destination) in enumerate(self._groups()):
            begins, some = chunk.begins[group] if chunk.begins else (0, 0), tokens[group]
            here = _cut(chunk.source[group], begins[0], source.block_tokens, some)
            cut.append((here, _cut(chunk.destination[group], begins[1], _tokens(source, destination), some)))
        ids = [tuple(side[0] for side in sides) for sides in zip(*cut, strict=True)]
        return Chunk(ids[0], ids[1], chunk.layers, tuple((here[1], there[1]) for here, there in cut))

    def plan(self, chunks: Sequence[Chunk]) -> list[PairRuns]:
        """What each pair moves to fill the destination's blocks of these chunks from the source's; pairs that move
        nothing are left out. All of a plan that has a group of `repacked` is staged.

        Raises OutOfRange or InvalidRequest (GROUP_MISMATCH, BLOCK_COUNT_MISMATCH, also for layers that cut a region)
        and never returns a run outside a listed block.
        """
        units = [self._units(chunk) for chunk in chunks]
        staged = any(group in self.repacked for some in units for group in some)
        drafts: dict[tuple[tuple[int, Share], ...], tuple[Runs, Repack | None] | None] = {}
        found = []
        for pair in self.pairs:
            # Ranks that have like shares move alike.
            key = tuple((group, _alike(share)) for group, share in self._shares[pair])
            if key not in drafts:
                drafts[key] = self._draft(pair, chunks, units, staged=staged)
            if (moves := drafts[key]) is not None:
                found.append(PairRuns(pair, *moves))
        return found

    def _groups(self) -> Iterator[tuple[Group, Group]]:
        return zip(self._source.pool.groups, self._destination.pool.groups, strict=True)

    def _all_shares(self) -> Iterator[tuple[int, Share]]:
        """Who gets which heads from whom, stage by stage, of each group. Stages without a layer in common exchange
        nothing.
        """
        source, destination = self._source, self._destination
        for group, (here, there) in enumerate(self._groups()):
            found = shares(here, source.stage_ranks, there, destination.stage_ranks)
            for here_in, there_in in common_stages(source.pool, destination.pool, group):
                for share in found:
                    rank = share.rank + there_in * destination.stage_ranks
                    source_rank = share.source_rank + here_in * source.stage_ranks
                    yield (
                        group,
                        share._replace(rank=rank, source_rank=source_rank, stage=there_in, source_stage=here_in),
                    )

    def _of_group(self, group: int) -> Iterator[Pattern]:
        """All that some pair moves of a group."""
        return (pattern for share in self._kinds[group] for pattern in self._of_share(group, share))

    def _of_share(self, group: int, share: Share) -> list[Pattern]:
        key = group, _alike(share)
        if key not in self._patterns:
            self._patterns[key] = patterns_of(self._source.pool, self._destination.pool, group, share)
        return self._patterns[key]

    def _within(self, group: int, share: Share, layers: LayerRange | None) -> list[Pattern]:
        found = self._of_share(group, share)
        if layers is None:
            return found
        return [pattern for pattern in found if holds(pattern.source, layers)]

    def _units(self, chunk: Chunk) -> dict[int, Units]:
        """Of each group of which a chunk moves something."""
        groups = len(self._source.pool.groups)
        if len(chunk.source) != groups or len(chunk.destination) != groups:
            raise InvalidRequest(Reason.GROUP_MISMATCH, f"expected block lists for {groups} groups")
        found = {}
        for i, (source, destination) in enumerate(self._groups()):
            src, dst = chunk.source[i], chunk.destination[i]
            if not chunk.begins and len(src) * source.block_tokens != len(dst) * _tokens(source, destination):
                message = f"group {i}: {len(src)} source blocks for {len(dst)} local blocks"
                raise InvalidRequest(Reason.BLOCK_COUNT_MISMATCH, message)
            check_ids(src, source.blocks, f"source group {i}")
            check_ids(dst, destination.blocks, f"destination group {i}")
            if extent := self.extent(chunk, i):
                found[i] = _units(source, destination, chunk, i, extent)
        return found

    def _draft(
        self, pair: Pair, chunks: Sequence[Chunk], units: list[dict[int, Units]], *, staged: bool
    ) -> tuple[Runs, Repack | None] | None:
        """What a pair moves; None: nothing."""
        draft = Draft()
        for chunk, some in zip(chunks, units, strict=True):
            for group, share in self._shares[pair]:
                if group in some:
                    found = self._within(group, share, chunk.layers)
                    (stage if staged else list_runs)(draft, found, some[group])
        if not draft.columns:
            return None
        return draft.runs(), Repack(tuple(draft.strips), draft.staging_bytes) if staged else None


def _alike(share: Share) -> Share:
    """The same of all pairs of ranks that move the same."""
    return share._replace(rank=0, source_rank=0)


def common_stages(source: PoolLayout, destination: PoolLayout, group: int) -> list[tuple[int, int]]:
    """The stages of both that have layers of a group in common."""
    mine, theirs = source.stage_spans(group), destination.stage_spans(group)
    found, here, there = set(), 0, 0
    while here < len(mine) and there < len(theirs):
        (_, end, stage), (_, other_end, other) = mine[here], theirs[there]
        found.add((stage, other))
        here, there = here + (end <= other_end), there + (other_end <= end)
    return sorted(found)


def _tokens(source: Group, destination: Group) -> int:
    """Tokens of a block of the destination, as far as a plan goes: a state is one block on both sides."""
    return source.block_tokens if source.kind is GroupKind.STATE else destination.block_tokens


def _cut(ids: Ids, begin: int, block_tokens: int, tokens: range) -> tuple[Ids, int]:
    """The blocks of some tokens, of those that begin with token `begin`, and the token with which they begin."""
    if not tokens:
        return ids[:0], begin
    first, end = (tokens.start - begin) // block_tokens, -(-(tokens.stop - begin) // block_tokens)
    return ids[first:end], begin + first * block_tokens


def _units(source: Group, destination: Group, chunk: Chunk, group: int, extent: range) -> Units:
    """The units of tokens whose blocks both sides list."""
    src, dst = chunk.source[group], chunk.destination[group]
    src_tokens, dst_tokens = source.block_tokens, _tokens(source, destination)
    src_begin, dst_begin = chunk.begins[group] if chunk.begins else (0, 0)
    if src_tokens == dst_tokens:
        count = len(extent) // src_tokens
        first, second = (extent.start - src_begin) // src_tokens, (extent.start - dst_begin) // dst_tokens
        listed = src[first : first + count]
        return Units(listed, dst[second : second + count], 0, 0, listed, np.arange(count, dtype=np.int64))
    at = np.arange(extent.start, extent.stop, min(src_tokens, dst_tokens), dtype=np.int64)
    here, src_token = np.divmod(at - src_begin, src_tokens)
    there, dst_token = np.divmod(at - dst_begin, dst_tokens)
    return Units(src[here], dst[there], src_token, dst_token, src[here[0] : here[-1] + 1], here - here[0])


@dataclass(frozen=True)
class Bridges:
    """Between this engine and a peer, both ways."""

    incoming: Bridge
    """From the peer's blocks to this engine's."""
    outgoing: Bridge

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """This engine's rank and the peer's, of all between which bytes may move, either way."""
        incoming = {(pair.rank, pair.source_rank) for pair in self.incoming.pairs}
        return tuple(sorted(incoming | {(pair.source_rank, pair.rank) for pair in self.outgoing.pairs}))


def bridges(here: Side, there: Side) -> Bridges:
    """Both ways between this engine and a peer."""
    return Bridges(Bridge(there, here), Bridge(here, there))
