"""The layout of a pool: groups of layers, and the regions of memory that hold their blocks.

Rules: a layout is a value, checked once when it is made; every offset and count used later was checked here. A layout
says where bytes are, never to whom they belong or when they may be touched.
"""

import hashlib
from functools import cached_property
from itertools import pairwise

from kvgrpc.core.values.groups import (
    BYTES_MAX,
    ITEM_BYTES,
    LAYERS_MAX,
    PAGES,
    PARTS,
    REGIONS_MAX,
    WHOLE,
    Group,
    GroupKind,
    PoolKind,
    Region,
    Section,
    Strides,
    TensorKind,
)
from kvgrpc.core.values.records import dataclass
from kvgrpc.core.values.strides import wrong_strides
from kvgrpc.errors import FieldViolation, InvalidRequest, Reason

__all__ = [
    "BYTES_MAX",
    "ITEM_BYTES",
    "LAYERS_MAX",
    "PAGES",
    "REGIONS_MAX",
    "WHOLE",
    "Group",
    "GroupKind",
    "PoolKind",
    "PoolLayout",
    "Region",
    "Section",
    "Strides",
    "TensorKind",
    "uniform_layout",
]


@dataclass(frozen=True)
class PoolLayout:
    """The groups of a pool, and the place of each block of each layer. A layout is the same for every rank of an
    engine, except that the ranks of each pipeline stage have the regions of that stage.

    Raises InvalidRequest (INVALID_FIELD) for anything that would let two blocks overlap or leave the memory. A block id
    of a space that several groups share is one block: in these groups it may lie on the same bytes.
    """

    groups: tuple[Group, ...]
    regions: tuple[Region, ...]
    total_bytes: int
    """Bytes of one rank's memory; if stages differ, of the rank with most."""

    def __post_init__(self) -> None:
        violations = [*_group_violations(self.groups), *_region_violations(self)]
        if violations:
            raise InvalidRequest(Reason.INVALID_FIELD, "the pool layout is not usable", violations=tuple(violations))

    @cached_property
    def spaces(self) -> tuple[int, ...]:
        """Block space number of each group. Spaces are numbered from 0 in the order of the groups."""
        numbers: dict[tuple[str, int], int] = {}
        return tuple(numbers.setdefault(_space(group, i), len(numbers)) for i, group in enumerate(self.groups))

    @cached_property
    def shared_spaces(self) -> tuple[tuple[int, ...], ...]:
        """Groups of each space that more than one group shares."""
        groups: dict[int, list[int]] = {}
        for group, space in enumerate(self.spaces):
            groups.setdefault(space, []).append(group)
        return tuple(tuple(some) for some in groups.values() if len(some) > 1)

    @cached_property
    def stages(self) -> int:
        """Number of pipeline stages. All have the same number of ranks, in the order of the ranks' numbers."""
        return max((region.stage for region in self.regions), default=0) + 1

    @cached_property
    def has_key_columns(self) -> bool:
        """True if keys of some layer stand in columns."""
        return any(region.strides is not None and region.strides.key_element for region in self.regions)

    @cached_property
    def by_group(self) -> tuple[tuple[Region, ...], ...]:
        """Regions of each group, in the order in which they are listed."""
        found: list[list[Region]] = [[] for _ in self.groups]
        for region in self.regions:
            found[region.group].append(region)
        return tuple(map(tuple, found))

    def stage_spans(self, group: int) -> list[tuple[int, int, int]]:
        """Returns the layers of a group as sorted rows (first, end, stage). Neighbours in one stage are one row."""
        found: list[tuple[int, int, int]] = []
        for region in sorted(self.by_group[group], key=lambda r: r.first_layer):
            first, end, stage = region.first_layer, region.first_layer + region.layers, region.stage
            if found and found[-1][2] == stage:
                last = found.pop()
                first, end = last[0], max(last[1], end)
            found.append((first, end, stage))
        return found

    def stage_layers(self, stage: int) -> list[int]:
        """Returns the numbers that a stage's layers have in their groups, each once, in order."""
        found: list[int] = []
        spans = {(r.first_layer, r.first_layer + r.layers) for r in self.regions if r.stage == stage}
        for first, end in sorted(spans):
            found.extend(range(max(first, found[-1] + 1 if found else 0), end))
        return found

    @cached_property
    def stage_bytes(self) -> tuple[int, ...]:
        """Bytes of a rank's memory that the regions of each stage reach."""
        ends = [0] * self.stages
        for region in self.regions:
            ends[region.stage] = max(ends[region.stage], _end(self.groups, region))
        return tuple(ends)

    @cached_property
    def block_sizes(self) -> tuple[tuple[int, int], ...]:
        """Row of each group: bytes of a block over all layers and stages, and the number of regions that hold them."""
        sizes = [(0, 0)] * len(self.groups)
        for region in self.regions:
            nbytes, regions = sizes[region.group]
            sizes[region.group] = nbytes + region.block_bytes, regions + 1
        return tuple(sizes)

    def block_bytes(self, group: int) -> int:
        """Returns the bytes of one block of `group` over all its layers."""
        return self.block_sizes[group][0]

    def fingerprint(self) -> str:
        """Returns a hex digest of everything that two pools must share to exchange blocks without conversion.

        Names, offsets, distances between blocks, block counts and block spaces are left out: each side has its own. The
        model's total heads are left out too: they are compared by themselves, together with the number of ranks.
        """
        parts = [repr(_compared(group)) for group in self.groups]
        parts += [
            repr((r.group, r.first_layer, r.layers, r.tensor.value, r.block_bytes, r.stage, *_stated(r.strides)))
            for r in self.regions
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _stated(strides: Strides | None) -> tuple[int, ...]:
    """Returns the strides as numbers. `key_element` is left out unless keys stand in columns."""
    return () if strides is None else tuple(strides) if strides.key_element else strides[:4]


def _compared(group: Group) -> tuple[object, ...]:
    """Returns what two pools must share of a group. A state is one block for any number of tokens."""
    tokens, order = (1, "") if group.kind is GroupKind.STATE else (group.block_tokens, group.order)
    shape = group.kv_heads, group.head_dim, group.dtype
    return (group.kind.value, group.layers, tokens, *shape, order, group.window_tokens)


def uniform_layout(
    group: Group, block_bytes_per_layer: int, layers_per_region: int = 1, strides: Strides | None = None
) -> PoolLayout:
    """Makes a dense layout of one group: one region for every `layers_per_region` layers, blocks back to back. Each
    region has `strides`.
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
        order = "" if group.order in ("token_major", "head_major") else "must be token_major or head_major"
        others = {"order": order, "sections": _wrong_sections(group), "total_kv_heads": _wrong_total_heads(group)}
        found += [FieldViolation(f"groups[{i}].{field}", wrong) for field, wrong in others.items() if wrong]
    return found + _space_violations(groups)


def _space_violations(groups: tuple[Group, ...]) -> list[FieldViolation]:
    """Returns a violation for each group whose block count differs from that of its space."""
    found = []
    first_of_space: dict[tuple[str, int], int] = {}
    for i, group in enumerate(groups):
        first = first_of_space.setdefault(_space(group, i), i)
        if group.blocks != groups[first].blocks:
            shared = f"differs from that of groups[{first}], with which it shares the block space {group.space}"
            found.append(FieldViolation(f"groups[{i}].blocks", shared))
    return found


def _wrong_total_heads(group: Group) -> str:
    if group.total_kv_heads < 0:
        return "must not be negative"
    if group.total_kv_heads and group.kind in (GroupKind.MLA, GroupKind.STATE):
        return f"is 0 in a group of kind {group.kind.value}: its ranks share no heads"
    return ""


def _wrong_sections(group: Group) -> str:
    if group.sections and group.kind is not GroupKind.STATE:
        return "are those of a state"
    if any(nbytes <= 0 or total <= 0 or total % nbytes for nbytes, total in group.sections):
        return "have bytes, and all ranks together whole shares of them"
    return ""


def _space(group: Group, index: int) -> tuple[str, int]:
    """Returns a key that tells the block space of a group from all others."""
    return (group.space, 0) if group.space else ("", index)


def _region_violations(layout: PoolLayout) -> list[FieldViolation]:
    """Returns what is wrong with the regions, which may come from a peer: no size is used before it is checked."""
    if not 0 < layout.total_bytes <= BYTES_MAX:
        return [FieldViolation("total_bytes", f"lies between 1 and {BYTES_MAX}")]
    if len(layout.regions) > REGIONS_MAX:
        return [FieldViolation("regions", f"are at most {REGIONS_MAX}")]
    stages = {region.stage for region in layout.regions}
    if stages != set(range(len(stages))):
        return [FieldViolation("regions", "each stage from 0 on has some: of the engine's last one, too")]
    found = []
    usable = []
    spans: dict[int, list[tuple[int, int, int]]] = {}
    for i, region in enumerate(layout.regions):
        violation = _shape_violation(layout.groups, region, i)
        if violation is not None:
            found.append(violation)
            continue
        usable.append(region)
        end = _end(layout.groups, region)
        if end > layout.total_bytes:
            found.append(FieldViolation(f"regions[{i}]", f"ends at byte {end} of {layout.total_bytes}"))
        spans.setdefault(region.stage, []).append((region.offset, end, i))
    overlaps = [violation for some in spans.values() for violation in _overlaps(layout, some)]
    covered = _coverage_violations(layout.groups, usable) + _section_violations(layout.groups, usable)
    return found + covered + overlaps or _parted(layout)


def _parted(layout: PoolLayout) -> list[FieldViolation]:
    """Returns the groups with a layer in two stages. The regions must have nothing else wrong."""
    found = []
    for i in range(len(layout.groups) if layout.stages > 1 else 0):
        spans = layout.stage_spans(i)
        if any(first < end for (_, end, _), (first, _, _) in pairwise(spans)):
            found.append(FieldViolation(f"groups[{i}].layers", "each layer is in one stage"))
    return found


def _end(groups: tuple[Group, ...], region: Region) -> int:
    """Returns the offset of the byte after the region's last block."""
    return region.offset + (groups[region.group].blocks - 1) * region.stride_bytes + region.block_bytes


def _shape_violation(groups: tuple[Group, ...], region: Region, i: int) -> FieldViolation | None:
    """Returns what is wrong with one region by itself."""
    if not 0 <= region.group < len(groups):
        return FieldViolation(f"regions[{i}].group", "names no group")
    if region.layers <= 0 or region.block_bytes <= 0 or region.offset < 0:
        return FieldViolation(f"regions[{i}]", "layers, block_bytes and offset must be positive")
    if region.stride_bytes < region.block_bytes:
        return FieldViolation(f"regions[{i}].stride_bytes", "is smaller than block_bytes")
    if region.stride_bytes > BYTES_MAX:  # nothing else bounds the stride of a lone block
        return FieldViolation(f"regions[{i}].stride_bytes", f"is at most {BYTES_MAX}")
    kind = groups[region.group].kind
    if not set(PARTS[region.tensor]) <= set(PARTS[WHOLE[kind]]):
        return FieldViolation(f"regions[{i}].tensor", f"a group of kind {kind.value} holds no {region.tensor.value}")
    wrong = "" if region.strides is None else wrong_strides(groups[region.group], region, region.strides)
    return FieldViolation(f"regions[{i}].strides", wrong) if wrong else None


def _coverage_violations(groups: tuple[Group, ...], regions: list[Region]) -> list[FieldViolation]:
    """Returns the groups whose regions do not hold each part of each layer exactly once."""
    ranges: dict[tuple[int, TensorKind], list[tuple[int, int]]] = {}
    for region in regions:
        for part in PARTS[region.tensor]:
            span = (region.first_layer, region.first_layer + region.layers)
            ranges.setdefault((region.group, part), []).append(span)
    found = []
    for i, group in enumerate(groups):
        parts = PARTS[WHOLE[group.kind]]
        wrong = [part.value for part in parts if not _covers(ranges.get((i, part), []), group.layers)]
        if wrong:
            what = f"regions must hold the {' and '.join(wrong)} of each layer exactly once"
            found.append(FieldViolation(f"groups[{i}].layers", what))
    return found


def _section_violations(groups: tuple[Group, ...], regions: list[Region]) -> list[FieldViolation]:
    """Returns the groups whose sections do not add up to the bytes of their states, layer by layer."""
    found = []
    for i, group in enumerate(groups):
        nbytes = sum(section.nbytes for section in group.sections)
        if group.sections and any(r.group == i and (r.layers, r.block_bytes) != (1, nbytes) for r in regions):
            found.append(
                FieldViolation(f"groups[{i}].sections", "are all bytes of a block, in regions of one layer each")
            )
    return found


def _covers(ranges: list[tuple[int, int]], layers: int) -> bool:
    """Returns True if the ranges, sorted, run from 0 to `layers` without gap or overlap."""
    at = 0
    for first, end in sorted(ranges):
        if first != at:
            return False
        at = end
    return at == layers


def _overlaps(layout: PoolLayout, spans: list[tuple[int, int, int]]) -> list[FieldViolation]:
    """Returns violations of overlapping regions. Regions may interleave (blocks of all layers in one row)."""
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
    """Returns violations in a cluster of interleaved regions, sorted by offset. The regions' first blocks must follow
    each other within one row. Blocks of different groups of one space may overlap.
    """
    found = []
    in_group: dict[int, tuple[int, int]] = {}
    """Per group, the end of its blocks so far and the region that ends there."""
    in_space: dict[int, tuple[int, int]] = {}
    """End and last region of the two spaces whose blocks end last, the later one first."""
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
