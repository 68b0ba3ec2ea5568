"""What a pool looks like: groups of layers, and the regions of memory that hold their blocks.

Rules: a layout is a value, checked once when it is made; every offset and count used later was checked here. It says
where bytes are, never whose they are or when they may be touched.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from kvgrpc.errors import FieldViolation, InvalidRequest, OutOfRange, Reason

BYTES_MAX = 2**53 - 1
"""Above any memory; every language can hold it, and no sum of offsets leaves 64 bits."""
LAYERS_MAX = 1 << 16
REGIONS_MAX = 1 << 16


class PoolKind(Enum):
    """Which side decides which blocks are in use."""

    SERVER_MANAGED = "server_managed"
    """This server allocates and frees blocks (AllocateBlocks, FreeBlocks)."""
    ENGINE_MANAGED = "engine_managed"
    """The engine's block manager does; the server only pins."""


class GroupKind(Enum):
    """How the layers of a group use their blocks."""

    FULL_ATTENTION = "full_attention"
    SLIDING_WINDOW = "sliding_window"
    MLA = "mla"
    STATE = "state"


class TensorKind(Enum):
    """What a region holds of each of its layers."""

    KV = "kv"
    """Keys and values of each block together, keys first."""
    K = "k"
    V = "v"
    LATENT = "latent"
    """MLA's latent vectors."""
    STATE = "state"


WHOLE: dict[GroupKind, TensorKind] = {
    GroupKind.FULL_ATTENTION: TensorKind.KV,
    GroupKind.SLIDING_WINDOW: TensorKind.KV,
    GroupKind.MLA: TensorKind.LATENT,
    GroupKind.STATE: TensorKind.STATE,
}
"""What one region holds that has all of its layers."""
_PARTS: dict[TensorKind, tuple[TensorKind, ...]] = {
    kind: (TensorKind.K, TensorKind.V) if kind is TensorKind.KV else (kind,) for kind in TensorKind
}


@dataclass(frozen=True)
class Group:
    """Layers that share a block table."""

    name: str
    kind: GroupKind
    layers: int
    """How many layers the group has; they are numbered from 0 within the group."""
    block_tokens: int
    """Tokens per block."""
    blocks: int
    """Blocks in the group; ids run from 0 to blocks - 1."""
    kv_heads: int
    """KV heads per rank."""
    head_dim: int
    """Elements per head."""
    dtype: str
    """Element type, by numpy's or torch's name: float32, bfloat16, float8_e4m3fn."""
    order: str = "token_major"
    """Order inside a block: token_major ([tokens, heads, dim]) or head_major ([heads, tokens, dim])."""
    window_tokens: int = 0
    """Sliding window in tokens; 0 where the group has none."""
    space: str = ""
    """Block space. Groups that name the same one share their block ids, and their layers may alias the same bytes: a
    block belongs to one of these groups at a time. Empty: the group has a space of its own.
    """

    def first_of(self, tokens: int) -> int:
        """In token order, the first block that an engine reads that goes on after `tokens` tokens: with a window that
        of the first token in it, even if the last of the tokens is computed once more.
        """
        windowed = self.window_tokens and self.kind is not GroupKind.STATE
        return max(tokens - self.window_tokens, 0) // self.block_tokens if windowed else 0

    def blocks_of(self, tokens: int) -> int:
        """How many blocks stand for `tokens` tokens: all from `first_of` on. A state has one block, however long its
        prompt.
        """
        if self.kind is GroupKind.STATE:
            return min(tokens, 1)
        return -(-tokens // self.block_tokens) - self.first_of(tokens)

    def held_of(self, tokens: int, have_tokens: int) -> int:
        """How many of these blocks are whole, from the first on, when `have_tokens` tokens are there."""
        if self.kind is GroupKind.STATE:
            return 0
        return max(have_tokens // self.block_tokens - self.first_of(tokens), 0)

    def stands_for(self, tokens: int, prefix: int) -> bool:
        """Whether the blocks of `tokens` tokens begin with those of the first `prefix` tokens."""
        if self.kind is GroupKind.STATE:
            return prefix == tokens
        return self.first_of(prefix) == self.first_of(tokens)


@dataclass(frozen=True)
class Region:
    """A (layer set, group) array of blocks in one rank's memory.

    Block `b` occupies bytes [offset + b * stride_bytes, offset + b * stride_bytes + block_bytes) of the rank's memory.
    """

    group: int
    """Index into `PoolLayout.groups`."""
    first_layer: int
    layers: int
    """The region holds layers [first_layer, first_layer + layers) of the group."""
    offset: int
    stride_bytes: int
    block_bytes: int
    tensor: TensorKind = TensorKind.KV


@dataclass(frozen=True)
class PoolLayout:
    """The groups of a pool and where each block of each layer lies; the same for every rank of an engine.

    Raises InvalidRequest (INVALID_FIELD) for anything that would let two blocks overlap or leave the memory. A block
    id of a space that several groups share is one block: in these groups it may lie on the same bytes.
    """

    groups: tuple[Group, ...]
    regions: tuple[Region, ...]
    total_bytes: int
    """Bytes of one rank's memory."""

    def __post_init__(self) -> None:
        violations = [*_group_violations(self.groups), *_region_violations(self)]
        if violations:
            raise InvalidRequest(Reason.INVALID_FIELD, "the pool layout is not usable", violations=tuple(violations))

    @cached_property
    def spaces(self) -> tuple[int, ...]:
        """For each group the number of its block space; they are numbered from 0 in the order of the groups."""
        numbers: dict[tuple[str, int], int] = {}
        return tuple(numbers.setdefault(_space(group, i), len(numbers)) for i, group in enumerate(self.groups))

    @cached_property
    def shared_spaces(self) -> tuple[tuple[int, ...], ...]:
        """The groups of each space that more than one group shares."""
        groups: dict[int, list[int]] = {}
        for group, space in enumerate(self.spaces):
            groups.setdefault(space, []).append(group)
        return tuple(tuple(some) for some in groups.values() if len(some) > 1)

    @cached_property
    def block_sizes(self) -> tuple[tuple[int, int], ...]:
        """For one block of each group: its bytes over all layers, and how many regions have some of them."""
        sizes = [(0, 0)] * len(self.groups)
        for region in self.regions:
            nbytes, regions = sizes[region.group]
            sizes[region.group] = nbytes + region.block_bytes, regions + 1
        return tuple(sizes)

    def block_bytes(self, group: int) -> int:
        """Bytes of one block of `group` over all its layers."""
        return self.block_sizes[group][0]

    def bytes_of(self, blocks: Sequence[int]) -> int:
        """Bytes of `blocks[group]` blocks of each group over all their layers."""
        return sum(count * nbytes for count, (nbytes, _) in zip(blocks, self.block_sizes, strict=True))

    def fingerprint(self) -> str:
        """Hex digest of everything that two pools must share to exchange blocks without conversion.

        Names, offsets, strides, block counts and block spaces are left out: each side has its own.
        """
        parts = [
            repr((g.kind.value, g.layers, g.block_tokens, g.kv_heads, g.head_dim, g.dtype, g.order, g.window_tokens))
            for g in self.groups
        ]
        parts += [repr((r.group, r.first_layer, r.layers, r.tensor.value, r.block_bytes)) for r in self.regions]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def check_prefix(groups: Sequence[Group], tokens: int, prefix: int) -> None:
    """Raises OutOfRange (CONTENT_RANGE) where the blocks of `tokens` tokens do not serve the first `prefix` of them."""
    for group in groups:
        if not group.stands_for(tokens, prefix):
            state = group.kind is GroupKind.STATE
            keeps = "one state" if state else f"the last {group.window_tokens} tokens"
            raise OutOfRange(
                Reason.CONTENT_RANGE,
                f"group {group.name} keeps {keeps}: that serves all {tokens} tokens and not the first {prefix} alone",
            )


def uniform_layout(group: Group, block_bytes_per_layer: int, layers_per_region: int = 1) -> PoolLayout:
    """A dense layout of one group: one region for every `layers_per_region` layers, blocks back to back."""
    block_bytes = block_bytes_per_layer * layers_per_region
    region_bytes = block_bytes * group.blocks
    count, tensor = group.layers // layers_per_region, WHOLE[group.kind]
    regions = tuple(
        Region(0, i * layers_per_region, layers_per_region, i * region_bytes, block_bytes, block_bytes, tensor)
        for i in range(count)
    )
    return PoolLayout((group,), regions, region_bytes * count)


def _group_violations(groups: tuple[Group, ...]) -> list[FieldViolation]:
    found = []
    first_of_space: dict[tuple[str, int], int] = {}
    if not groups:
        found.append(FieldViolation("groups", "a pool has at least one group"))
    if len({g.name for g in groups}) != len(groups):
        found.append(FieldViolation("groups", "group names must differ"))
    for i, group in enumerate(groups):
        for field in ("layers", "block_tokens", "blocks", "kv_heads", "head_dim"):
            if getattr(group, field) <= 0:
                found.append(FieldViolation(f"groups[{i}].{field}", "must be positive"))
        if group.layers > LAYERS_MAX:
            found.append(FieldViolation(f"groups[{i}].layers", f"is at most {LAYERS_MAX}"))
        if group.window_tokens < 0:
            found.append(FieldViolation(f"groups[{i}].window_tokens", "must not be negative"))
        if group.order not in ("token_major", "head_major"):
            found.append(FieldViolation(f"groups[{i}].order", "must be token_major or head_major"))
        first = first_of_space.setdefault(_space(group, i), i)
        if group.blocks != groups[first].blocks:
            shared = f"differs from that of groups[{first}], with which it shares the block space {group.space}"
            found.append(FieldViolation(f"groups[{i}].blocks", shared))
    return found


def _space(group: Group, index: int) -> tuple[str, int]:
    """What tells the block space of a group from all others."""
    return (group.space, 0) if group.space else ("", index)


def _region_violations(layout: PoolLayout) -> list[FieldViolation]:
    """What is wrong with the regions. They may come from a peer: nothing is expanded before its size was checked."""
    if not 0 < layout.total_bytes <= BYTES_MAX:
        return [FieldViolation("total_bytes", f"lies between 1 and {BYTES_MAX}")]
    if len(layout.regions) > REGIONS_MAX:
        return [FieldViolation("regions", f"are at most {REGIONS_MAX}")]
    found = []
    usable = []
    spans = []
    for i, region in enumerate(layout.regions):
        violation = _shape_violation(layout.groups, region, i)
        if violation is not None:
            found.append(violation)
            continue
        usable.append(region)
        blocks = layout.groups[region.group].blocks
        end = region.offset + (blocks - 1) * region.stride_bytes + region.block_bytes
        if end > layout.total_bytes:
            found.append(FieldViolation(f"regions[{i}]", f"ends at byte {end} of {layout.total_bytes}"))
        spans.append((region.offset, end, i))
    return found + _coverage_violations(layout.groups, usable) + _overlaps(layout, spans)


def _shape_violation(groups: tuple[Group, ...], region: Region, i: int) -> FieldViolation | None:
    """What is wrong with a region by itself."""
    if not 0 <= region.group < len(groups):
        return FieldViolation(f"regions[{i}].group", "names no group")
    if region.layers <= 0 or region.block_bytes <= 0 or region.offset < 0:
        return FieldViolation(f"regions[{i}]", "layers, block_bytes and offset must be positive")
    if region.stride_bytes < region.block_bytes:
        return FieldViolation(f"regions[{i}].stride_bytes", "is smaller than block_bytes")
    if region.stride_bytes > BYTES_MAX:  # of a lone block nothing else bounds it
        return FieldViolation(f"regions[{i}].stride_bytes", f"is at most {BYTES_MAX}")
    kind = groups[region.group].kind
    if not set(_PARTS[region.tensor]) <= set(_PARTS[WHOLE[kind]]):
        return FieldViolation(f"regions[{i}].tensor", f"a group of kind {kind.value} holds no {region.tensor.value}")
    return None


def _coverage_violations(groups: tuple[Group, ...], regions: list[Region]) -> list[FieldViolation]:
    """Groups whose regions do not hold each part of each layer once."""
    ranges: dict[tuple[int, TensorKind], list[tuple[int, int]]] = {}
    for region in regions:
        for part in _PARTS[region.tensor]:
            span = (region.first_layer, region.first_layer + region.layers)
            ranges.setdefault((region.group, part), []).append(span)
    found = []
    for i, group in enumerate(groups):
        parts = _PARTS[WHOLE[group.kind]]
        wrong = [part.value for part in parts if not _covers(ranges.get((i, part), []), group.layers)]
        if wrong:
            what = f"regions must hold the {' and '.join(wrong)} of each layer exactly once"
            found.append(FieldViolation(f"groups[{i}].layers", what))
    return found


def _covers(ranges: list[tuple[int, int]], layers: int) -> bool:
    """Whether the ranges, put in order, run from 0 to `layers` without gap or overlap."""
    at = 0
    for first, end in sorted(ranges):
        if first != at:
            return False
        at = end
    return at == layers


def _overlaps(layout: PoolLayout, spans: list[tuple[int, int, int]]) -> list[FieldViolation]:
    """Regions may interleave (blocks of all layers in one row), but no two blocks may share a byte."""
    found: list[FieldViolation] = []
    cluster: list[int] = []
    cluster_end = 0
    for start, end, i in sorted(spans):
        if start >= cluster_end:
            found += _row_violations(layout, cluster)
            cluster = []
        cluster.append(i)
        cluster_end = max(cluster_end, end)
    return found + _row_violations(layout, cluster)


def _row_violations(layout: PoolLayout, cluster: list[int]) -> list[FieldViolation]:
    """Regions whose bytes mix, by offset: their first blocks must stand within one row, one after another, but that
    those of different groups of one space may lie on each other.
    """
    found = []
    in_group: dict[int, tuple[int, int]] = {}
    """Where the blocks of each group end so far, and the region that ends there."""
    in_space: dict[int, tuple[int, int]] = {}
    """The same of the two spaces whose blocks end last, the last one first."""
    for i in cluster:
        region, first = layout.regions[i], layout.regions[cluster[0]]
        space, end = layout.spaces[region.group], region.offset + region.block_bytes
        others = [last for other, last in in_space.items() if other != space]
        before = max((0, cluster[0]), in_group.get(region.group, (0, 0)), *others[:1])
        in_row = region.stride_bytes == first.stride_bytes and end <= first.offset + first.stride_bytes
        if not in_row or before[0] > region.offset:
            found.append(FieldViolation(f"regions[{i}].offset", f"overlaps regions[{before[1]}]"))
        in_group[region.group] = max(in_group.get(region.group, (0, i)), (end, i))
        in_space[space] = max(in_space.get(space, (0, i)), (end, i))
        in_space = dict(sorted(in_space.items(), key=lambda row: row[1], reverse=True)[:2])
    return found
