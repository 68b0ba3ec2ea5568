"""What a pool looks like: groups of layers, and the regions of memory that hold their blocks.

Rules: a layout is a value, checked once when it is made; every offset and count used later was checked here. It says
where bytes are, never whose they are or when they may be touched.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

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


ITEM_BYTES = {
    "float64": 8, "int64": 8, "uint64": 8,
    "float32": 4, "int32": 4, "uint32": 4,
    "bfloat16": 2, "float16": 2, "int16": 2, "uint16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "int8": 1, "uint8": 1,
}  # fmt: skip
"""Bytes of one element. Blocks of other types are moved whole, or not at all."""


class Strides(NamedTuple):
    """Bytes from one element to the next inside a block, along each dimension. The elements of one head of one token
    stand side by side.
    """

    layer: int
    part: int
    """From the keys of a layer to its values."""
    head: int
    token: int


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
    total_kv_heads: int = 0
    """KV heads of the model: each rank has its share of them, or, of fewer heads than ranks, one that others have, too.
    0: as many as all ranks have together. Latents are the same on all ranks, and states are each rank's own: both 0.
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
    strides: Strides | None = None
    """Where the elements of a block stand; None: side by side, layer after layer, keys before values, and then in the
    group's order.
    """


@dataclass(frozen=True)
class PoolLayout:
    """The groups of a pool and where each block of each layer lies; the same for every rank of an engine.

    Raises InvalidRequest (INVALID_FIELD) for anything that would let two blocks overlap or leave the memory.
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

        Names, offsets, strides and block counts are left out: each side has its own.
        """
        parts = [
            repr((g.kind.value, g.layers, g.block_tokens, g.kv_heads, g.head_dim, g.dtype, g.order, g.window_tokens))
            for g in self.groups
        ]
        parts += [
            repr((r.group, r.first_layer, r.layers, r.tensor.value, r.block_bytes, *(r.strides or ())))
            for r in self.regions
        ]
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


def uniform_layout(
    group: Group, block_bytes_per_layer: int, layers_per_region: int = 1, strides: Strides | None = None
) -> PoolLayout:
    """A dense layout of one group: one region for every `layers_per_region` layers, blocks back to back. `strides`: of
    each region.
    """
    block_bytes = block_bytes_per_layer * layers_per_region
    region_bytes = block_bytes * group.blocks
    count, tensor = group.layers // layers_per_region, WHOLE[group.kind]
    regions = tuple(
        Region(0, i * layers_per_region, layers_per_region, i * region_bytes, block_bytes, block_bytes, tensor, strides)
        for i in range(count)
    )
    return PoolLayout((group,), regions, region_bytes * count)


def _group_violations(groups: tuple[Group, ...]) -> list[FieldViolation]:
    found = []
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
        if wrong := _wrong_total_heads(group):
            found.append(FieldViolation(f"groups[{i}].total_kv_heads", wrong))
    return found


def _wrong_total_heads(group: Group) -> str:
    if group.total_kv_heads < 0:
        return "must not be negative"
    if group.total_kv_heads and group.kind in (GroupKind.MLA, GroupKind.STATE):
        return f"is 0 in a group of kind {group.kind.value}: its ranks share no heads"
    return ""


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
    wrong = "" if region.strides is None else _wrong_strides(groups[region.group], region, region.strides)
    return FieldViolation(f"regions[{i}].strides", wrong) if wrong else None


def _wrong_strides(group: Group, region: Region, strides: Strides) -> str:
    """Why these strides say of no byte of a block what it is, or of one twice; empty where they do."""
    if group.kind is GroupKind.STATE or group.dtype not in ITEM_BYTES:
        what = "a state" if group.kind is GroupKind.STATE else f"elements of type {group.dtype}"
        return f"{what} cannot be told apart within a block: state no strides"
    end = group.head_dim * ITEM_BYTES[group.dtype]
    if max(strides) > region.block_bytes or min(strides) < 0:
        return f"lie between 0 and {region.block_bytes}, the bytes of a block"
    counts = (region.layers, len(_PARTS[region.tensor]), group.kv_heads, group.block_tokens)
    for stride, count in sorted((stride, count) for stride, count in zip(strides, counts, strict=True) if count > 1):
        if stride < end:
            return f"a stride of {stride} bytes lets elements overlap that take {end}"
        end += stride * (count - 1)
    return "" if end <= region.block_bytes else f"reach byte {end} of {region.block_bytes}"


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
    """Regions whose bytes mix, by offset: their first blocks must stand one after another within one row."""
    found = []
    for before, i in pairwise(cluster):
        first, left, right = layout.regions[cluster[0]], layout.regions[before], layout.regions[i]
        same_rows = right.stride_bytes == first.stride_bytes
        in_row = right.offset + right.block_bytes <= first.offset + first.stride_bytes
        if not (same_rows and in_row and left.offset + left.block_bytes <= right.offset):
            found.append(FieldViolation(f"regions[{i}].offset", f"overlaps regions[{before}]"))
    return found
