"""Plans which ranks move which bytes between two pools that may be split and laid out differently.

A bridge is made from the pools of two engines, and names the pairs of ranks that move bytes, and the runs that each
pair copies for given lists of blocks. Long runs are copied directly. For short runs the destination reads whole blocks
into a staging buffer and copies the bytes it needs from there.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from kvgrpc.core.values.block_ids import Ids, check_ids
from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.call import LayerRange
from kvgrpc.core.values.chunks import Chunk, Size
from kvgrpc.core.values.head_shares import HeadShare, shares
from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout
from kvgrpc.core.values.patterns import Pattern, patterns_of, unit_tokens
from kvgrpc.core.values.plans import Draft, Pair, PairRuns, Units, list_runs, regions_of, stage
from kvgrpc.core.values.records import dataclass
from kvgrpc.core.values.strips import Repack
from kvgrpc.errors import InvalidRequest, Reason

RUN_BYTES_MIN = 2_048
"""Minimum length of a run that is copied by itself. Over cma and nixl, shorter runs take longer one by one than reading
twice their bytes in whole blocks and re-packing them: docs/performance.md has the figures.
"""
STAGING_BYTES = 64 << 20
"""Size of a rank's staging buffer. One posting uses a part of the buffer, so that others move meanwhile."""
STAGED_AT_ONCE_BYTES = STAGING_BYTES // 4
"""Maximum bytes that one posting reads into the staging buffer, unless one block is larger."""
MAPPED = frozenset({"shm"})
"""Data paths by which ranks map their peers' memory. A re-pack copies straight out of the mapping."""


def repacked_at_once(data_paths: Iterable[str]) -> int:
    """Returns the maximum bytes of one posting that ends with a re-pack over these data paths. A posting that needs no
    staging buffer holds up no other posting, and may be larger.
    """
    return STAGING_BYTES if MAPPED.issuperset(data_paths) else STAGED_AT_ONCE_BYTES


class BridgeSide(NamedTuple):
    """One engine's input to a bridge: its pool and its number of ranks."""

    pool: PoolLayout
    ranks: int

    @property
    def stage_ranks(self) -> int:
        """Ranks of each pipeline stage, which share its heads."""
        return self.ranks // self.pool.stages


class Bridge:
    """Maps blocks of a source to blocks of a destination. The two pools must have been found compatible."""

    def __init__(self, source: BridgeSide, destination: BridgeSide, run_bytes_min: int = RUN_BYTES_MIN) -> None:
        self._source = source
        self._destination = destination
        self._run_bytes_min = run_bytes_min
        self._shares: dict[Pair, list[tuple[int, HeadShare]]] = {}
        self._kinds: list[dict[HeadShare, None]] = [{} for _ in source.pool.groups]
        """The distinct shares of each group: shares that move the same bytes appear once."""
        for group, share in self._all_shares():
            self._shares.setdefault(Pair(share.rank, share.source_rank), []).append((group, share))
            self._kinds[group][_alike(share)] = None
        self.pairs = tuple(sorted(self._shares))
        self._patterns: dict[tuple[int, HeadShare], list[Pattern]] = {}
        self._sizes: dict[tuple[int, LayerRange | None], Size] = {}
        self._arriving: dict[tuple[int, LayerRange | None], list[int]] = {}
        self._unit_tokens = [unit_tokens(here, there) for here, there in self._groups()]
        self._destination_tokens = [_tokens(here, there) for here, there in self._groups()]
        self.block_tokens = list(
            map(max, [group.block_tokens for group in source.pool.groups], self._destination_tokens)
        )
        """For each group, the number of tokens that postings never split: the larger block size of the two sides."""

    @cached_property
    def repacked(self) -> frozenset[int]:
        """Groups whose runs are too short to be moved one by one."""
        return frozenset(
            group
            for group in range(len(self._kinds))
            if any(pattern.dimensions and pattern.run_bytes < self._run_bytes_min for pattern in self._of_group(group))
        )

    def run_bytes(self, group: int) -> int:
        """Returns the length of the shortest run of a group's blocks."""
        return min(pattern.run_bytes for pattern in self._of_group(group))

    def cuts_blocks(self, group: int) -> bool:
        """Returns True if some run of a group is shorter than a whole block of its region."""
        return any(pattern.run_bytes < pattern.source.block_bytes for pattern in self._of_group(group))

    def bytes_of_block(self, group: int) -> int:
        """Returns the bytes that `block_tokens` tokens of a group bring to the destination rank that gets most."""
        return self.block_tokens[group] // self._unit_tokens[group] * max(self._bytes_of_unit(group, None))

    def bytes_of(self, chunks: Sequence[Chunk]) -> int:
        """Returns the bytes that arrive in all ranks of the destination."""
        nbytes = 0
        for chunk in chunks:
            for group in range(len(chunk.source)):
                if units := len(self.extent(chunk, group)) // self._unit_tokens[group]:
                    nbytes += units * sum(self._bytes_of_unit(group, chunk.layers))
        return nbytes

    def _bytes_of_unit(self, group: int, layers: LayerRange | None) -> list[int]:
        """Returns the bytes that one unit of tokens of a group brings to each rank of the destination, in `layers`."""
        key = group, layers
        if key not in self._arriving:
            arriving = [0] * self._destination.ranks
            for pair in self.pairs:
                for share in (share for of, share in self._shares[pair] if of == group):
                    arriving[pair.rank] += sum(pattern.nbytes for pattern in self._within(group, share, layers))
            self._arriving[key] = arriving
        return self._arriving[key]

    def size_of_block(self, group: int, layers: LayerRange | None) -> Size:
        """Returns the maximum cost of `block_tokens` tokens of a group, in `layers`, over the ranks of the destination.
        The cost is the bytes read, with those that a re-pack reads and does not use, and the runs, over all pairs of a
        rank. Ranks differ because some read from more ranks than others.
        """
        key = group, layers
        if key not in self._sizes:
            each: dict[HeadShare, tuple[int, int]] = {}
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
        """Returns the bytes and runs that these patterns move with `block_tokens` tokens."""
        tokens = self.block_tokens[group]
        if group in self.repacked:
            regions, blocks = regions_of(found), tokens // self._source.pool.groups[group].block_tokens
            return blocks * sum(region.block_bytes for region in regions), max(blocks * len(regions), len(found))
        units = tokens // self._unit_tokens[group]
        return units * sum(pattern.nbytes for pattern in found), units * sum(pattern.runs for pattern in found)

    def size_of(self, chunks: Sequence[Chunk]) -> Size:
        """Returns the cost of all chunks for each rank of the destination."""
        nbytes = blocks = runs = 0
        for chunk in chunks:
            for group in range(len(chunk.source)):
                extent, tokens = self.extent(chunk, group), self.block_tokens[group]
                if extent:
                    count = -(-extent.stop // tokens) - extent.start // tokens
                    each = self.size_of_block(group, chunk.layers)
                    nbytes, blocks, runs = nbytes + count * each.nbytes, blocks + count, runs + count * each.runs
        return Size(nbytes, blocks, runs)

    def stages(self, chunks: Sequence[Chunk]) -> bool:
        """Returns True if some of the chunks is re-packed."""
        return any(self.extent(chunk, group) for chunk in chunks for group in self.repacked)

    def extent(self, chunk: Chunk, group: int) -> range:
        """Returns the range of tokens whose blocks both sides list."""
        src_begin, dst_begin = chunk.begins[group] if chunk.begins else (0, 0)
        src_end = src_begin + len(chunk.source[group]) * self._source.pool.groups[group].block_tokens
        dst_end = dst_begin + len(chunk.destination[group]) * self._destination_tokens[group]
        return range(max(src_begin, dst_begin), min(src_end, dst_end))

    def begins(self, group: int, tokens: int, blocks: int) -> tuple[int, int]:
        """Returns the tokens at which the block lists of a prompt of `tokens` tokens begin, of the source and of the
        destination. The source lists all blocks of the prompt, the destination the last `blocks`.
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
        """Returns the chunk restricted to some tokens of one group."""
        return self._cut(chunk, [tokens if i == group else range(0) for i in range(len(chunk.source))])

    def trimmed(self, chunk: Chunk) -> Chunk:
        """Returns a chunk without the blocks that only one side lists."""
        return self._cut(chunk, [self.extent(chunk, group) for group in range(len(chunk.source))])

    def _cut(self, chunk: Chunk, tokens: Sequence[range]) -> Chunk:
        """Returns a chunk restricted to a range of tokens per group."""
        cut = []
        for group, source in enumerate(self._source.pool.groups):
            begins, some = chunk.begins[group] if chunk.begins else (0, 0), tokens[group]
            here = _cut(chunk.source[group], begins[0], source.block_tokens, some)
            cut.append((here, _cut(chunk.destination[group], begins[1], self._destination_tokens[group], some)))
        ids = [tuple(side[0] for side in sides) for sides in zip(*cut, strict=True)]
        return Chunk(ids[0], ids[1], chunk.layers, tuple((here[1], there[1]) for here, there in cut))

    def plan(self, chunks: Sequence[Chunk]) -> list[PairRuns]:
        """Returns what each pair moves to fill the destination's blocks of these chunks. Pairs that move nothing are
        left out. If one group of the plan is in `repacked`, the whole plan is staged.

        Raises OutOfRange or InvalidRequest (GROUP_MISMATCH, BLOCK_COUNT_MISMATCH, also for layers that cut a region)
        and never returns a run outside a listed block.
        """
        units = [self._units(chunk) for chunk in chunks]
        staged = bool(self.repacked) and any(group in self.repacked for some in units for group in some)
        drafts: dict[tuple[tuple[int, HeadShare], ...], tuple[Runs, Repack | None] | None] = {}
        found = []
        for pair in self.pairs:
            # Pairs with like shares move the same runs, so they share one draft.
            key = tuple([(group, _alike(share)) for group, share in self._shares[pair]])
            if key not in drafts:
                drafts[key] = self._draft(pair, chunks, units, staged=staged)
            if (moves := drafts[key]) is not None:
                found.append(PairRuns(pair, *moves))
        return found

    def _groups(self) -> Iterator[tuple[Group, Group]]:
        return zip(self._source.pool.groups, self._destination.pool.groups, strict=True)

    def _all_shares(self) -> Iterator[tuple[int, HeadShare]]:
        """Yields for each group which heads each rank gets from which rank, stage by stage. Stages that have no layer
        in common exchange nothing.
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
        """Yields every pattern that some pair moves of a group."""
        return (pattern for share in self._kinds[group] for pattern in self._of_share(group, share))

    def _of_share(self, group: int, share: HeadShare) -> list[Pattern]:
        key = group, _alike(share)
        if key not in self._patterns:
            self._patterns[key] = patterns_of(self._source.pool, self._destination.pool, group, share)
        return self._patterns[key]

    def _within(self, group: int, share: HeadShare, layers: LayerRange | None) -> list[Pattern]:
        found = self._of_share(group, share)
        if layers is None:
            return found
        return [pattern for pattern in found if pattern.source.holds(layers)]

    def _units(self, chunk: Chunk) -> dict[int, Units]:
        """Returns the units of each group of which the chunk moves something."""
        groups = len(self._source.pool.groups)
        if len(chunk.source) != groups or len(chunk.destination) != groups:
            raise InvalidRequest(Reason.GROUP_MISMATCH, f"expected block lists for {groups} groups")
        found = {}
        for i, (source, destination) in enumerate(self._groups()):
            src, dst = chunk.source[i], chunk.destination[i]
            if not chunk.begins and len(src) * source.block_tokens != len(dst) * self._destination_tokens[i]:
                message = f"group {i}: {len(src)} source blocks for {len(dst)} local blocks"
                raise InvalidRequest(Reason.BLOCK_COUNT_MISMATCH, message)
            check_ids(src, source.blocks, f"source group {i}")
            check_ids(dst, destination.blocks, f"destination group {i}")
            if extent := self.extent(chunk, i):
                found[i] = _units(source.block_tokens, self._destination_tokens[i], chunk, i, extent)
        return found

    def _draft(
        self, pair: Pair, chunks: Sequence[Chunk], units: list[dict[int, Units]], *, staged: bool
    ) -> tuple[Runs, Repack | None] | None:
        """Returns what a pair moves, or None if it moves nothing."""
        draft = Draft()
        for chunk, some in zip(chunks, units, strict=True):
            for group, share in self._shares[pair]:
                if group in some:
                    found = self._within(group, share, chunk.layers)
                    (stage if staged else list_runs)(draft, found, some[group])
        if not draft.columns:
            return None
        return draft.runs(), Repack(tuple(draft.strips), draft.staging_bytes) if staged else None


def _alike(share: HeadShare) -> HeadShare:
    """Returns a key that is equal for shares that move the same bytes."""
    return share._replace(rank=0, source_rank=0)


def common_stages(source: PoolLayout, destination: PoolLayout, group: int) -> list[tuple[int, int]]:
    """Returns the pairs of stages that have layers of a group in common."""
    mine, theirs = source.stage_spans(group), destination.stage_spans(group)
    found, here, there = set(), 0, 0
    while here < len(mine) and there < len(theirs):
        (_, end, stage), (_, other_end, other) = mine[here], theirs[there]
        found.add((stage, other))
        here, there = here + (end <= other_end), there + (other_end <= end)
    return sorted(found)


def _tokens(source: Group, destination: Group) -> int:
    """Returns the tokens of one destination block for planning. A state is one block on both sides."""
    return source.block_tokens if source.kind is GroupKind.STATE else destination.block_tokens


def _cut(ids: Ids, begin: int, block_tokens: int, tokens: range) -> tuple[Ids, int]:
    """Returns the blocks that hold `tokens`, from a list that begins at token `begin`, and their own first token."""
    if not tokens:
        return ids[:0], begin
    first, end = (tokens.start - begin) // block_tokens, -(-(tokens.stop - begin) // block_tokens)
    return ids[first:end], begin + first * block_tokens


def _units(src_tokens: int, dst_tokens: int, chunk: Chunk, group: int, extent: range) -> Units:
    """Returns the units of tokens whose blocks both sides list, with so many tokens in each block."""
    src, dst = chunk.source[group], chunk.destination[group]
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
    """The bridges between this engine and a peer, in both directions."""

    incoming: Bridge
    """Bridge from the peer's blocks to this engine's."""
    outgoing: Bridge

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Pairs (this engine's rank, the peer's rank) between which bytes may move in either direction."""
        incoming = {(pair.rank, pair.source_rank) for pair in self.incoming.pairs}
        return tuple(sorted(incoming | {(pair.source_rank, pair.rank) for pair in self.outgoing.pairs}))


def bridges(here: BridgeSide, there: BridgeSide) -> Bridges:
    """Makes the bridges between this engine and a peer."""
    return Bridges(Bridge(there, here), Bridge(here, there))
