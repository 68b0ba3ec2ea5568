"""Obstacles between two pools: the fields that keep blocks from being exchanged, and the cost of a bridge."""

from dataclasses import replace
from enum import Enum

from kvgrpc.core.values.bridge import STAGING_BYTES, Bridge, BridgeSide, common_stages
from kvgrpc.core.values.head_shares import total_heads
from kvgrpc.core.values.layout import PAGES, Group, GroupKind, PoolLayout, Strides
from kvgrpc.core.values.records import dataclass
from kvgrpc.core.values.views import view_of

ROWS_MAX = 1 << 16
"""Maximum number of regions of both sides times pairs of ranks. A plan may have to visit all of them for one block."""


@dataclass(frozen=True)
class Difference:
    """One field in which two engines differ."""

    field: str
    here: str
    there: str
    bridgeable: bool
    why: str


SCHEMA_NAMES = {
    "layers": "layer_count",
    "kv_heads": "kv_head_count",
    "total_kv_heads": "total_kv_head_count",
    "blocks": "block_count",
    "sections": "state_sections",
}
"""Schema names of a group's fields that are named differently here."""

EQUAL_FIELDS: dict[str, str] = {
    "kind": "layers of another kind use their blocks in another way",
    "layers": "the models have different numbers of layers",
    "head_dim": "heads, or states, have different sizes",
    "dtype": "elements have different types and are not converted",
    "window_tokens": "the sliding windows differ",
}
"""Fields of a group that must be equal, and why."""

WHOLE = "by whole blocks"
STORE = "a staging store of named tensors"
UNKNOWN = "of group {} nothing is known of the inside of blocks, which are moved whole"
SPLIT_FIELDS = {
    "block_tokens": "blocks hold different numbers of tokens",
    "kv_heads": "ranks hold different heads",
    "order": "elements inside a block stand in another order",
}
"""Fields of a group that may differ if the inside of its blocks is known."""


def differences(here: BridgeSide, there: BridgeSide) -> list[Difference]:
    """Returns all differences of two engines' pools that matter. If a group's blocks cannot be exchanged, the cost of a
    bridge is left out.
    """
    mine, theirs = here.pool, there.pool
    if holds_tensors(mine) != holds_tensors(theirs):
        one, other = (STORE if holds_tensors(pool) else "a pool of blocks" for pool in (mine, theirs))
        why = "tensors and blocks of a cache are not exchanged: pair engines of one kind"
        return [Difference("pool.groups", one, other, False, why)]
    if len(mine.groups) != len(theirs.groups):
        why = "the models group their layers differently"
        return [Difference("pool.groups", str(len(mine.groups)), str(len(theirs.groups)), False, why)]
    found = []
    for i in range(len(mine.groups)):
        found += _of_group(i, here, there)
    if all(difference.bridgeable for difference in found):
        found += _costs(here, there)
    return found


def _of_group(index: int, here: BridgeSide, there: BridgeSide) -> list[Difference]:
    a, b = here.pool.groups[index], there.pool.groups[index]
    insides = {_inside(here.pool, index), _inside(there.pool, index)}
    sections = bool(a.sections and b.sections)
    found = [
        _differs(index, field, a, b, why, bridgeable=False)
        for field, why in EQUAL_FIELDS.items()
        if not (sections and field == "head_dim")
    ]
    if sections:
        packed, compare = None, _by_sections
    elif insides == {Inside.TOKENS}:
        packed, compare = None, _split
    elif insides == {Inside.HEADS}:
        packed, compare = _told_apart(index, here, there), _by_heads
    else:
        packed, compare = _packed_otherwise(index, here, there), _whole
    found += compare(index, here, there)
    packed = None if any(difference and not difference.bridgeable for difference in found) else packed
    blocks = _differs(index, "blocks", a, b, "pools may have different sizes", bridgeable=True)
    return [difference for difference in (*found, blocks, packed) if difference is not None]


def _split(index: int, here: BridgeSide, there: BridgeSide) -> list[Difference | None]:
    """Returns the differences of a group in whose blocks every head of every token can be found."""
    a, b = here.pool.groups[index], there.pool.groups[index]
    low, high = sorted((a.block_tokens, b.block_tokens))
    tokens = "" if high % low == 0 else "; choose sizes of which one is a multiple of the other"
    found = [
        _differs(index, "block_tokens", a, b, f"{SPLIT_FIELDS['block_tokens']}{tokens}", bridgeable=not tokens),
        _differs(index, "order", a, b, SPLIT_FIELDS["order"], bridgeable=True),
    ]
    other_heads = _heads_differ(index, here, there)
    return [*found, other_heads or _differs(index, "kv_heads", a, b, SPLIT_FIELDS["kv_heads"], bridgeable=True)]


def _heads_differ(index: int, here: BridgeSide, there: BridgeSide) -> Difference | None:
    """Returns a difference if the models' head counts differ: engines would look for a head on other ranks."""
    heads, others = (total_heads(side.pool.groups[index], side.stage_ranks) for side in (here, there))
    if heads == others:
        return None
    why = f"{SPLIT_FIELDS['kv_heads']}; state total_kv_head_count where ranks have the same ones"
    return Difference(_path(index, "total_kv_heads"), str(heads), str(others), False, why)


def _by_heads(index: int, here: BridgeSide, there: BridgeSide) -> list[Difference | None]:
    """Returns the differences of a group in whose blocks every head can be found, and is moved as it is."""
    because = f"of group {here.pool.groups[index].name} it is not known where the tokens of a head are"
    found = [difference for difference in _split(index, here, there) if difference is not None]
    return [
        replace(difference, bridgeable=False, why=f"{difference.why}, and {because}")
        if difference.field.endswith((".block_tokens", ".order"))
        else difference
        for difference in found
    ]


def _told_apart(index: int, here: BridgeSide, there: BridgeSide) -> Difference | None:
    """Returns a difference unless the same layers hold keys and values together on both sides."""
    mine, theirs = _layers_by_tensor(here.pool, index), _layers_by_tensor(there.pool, index)
    if mine == theirs:
        return None
    why = f"of group {here.pool.groups[index].name} it is not known where keys and values of a head are"
    return Difference("pool.regions", str(mine), str(theirs), False, why)


def _layers_by_tensor(pool: PoolLayout, index: int) -> dict[str, list[tuple[int, int]]]:
    """Returns the layers of a group in regions of each tensor kind, as gapless ranges (first, end)."""
    found: dict[str, list[tuple[int, int]]] = {}
    for region in sorted(pool.by_group[index], key=lambda r: (r.tensor.value, r.first_layer)):
        spans = found.setdefault(region.tensor.value, [])
        first = spans.pop()[0] if spans and spans[-1][1] == region.first_layer else region.first_layer
        spans.append((first, region.first_layer + region.layers))
    return found


def _whole(index: int, here: BridgeSide, there: BridgeSide) -> list[Difference | None]:
    """Returns the differences of a group whose blocks are moved whole. A state is always one block."""
    a, b = here.pool.groups[index], there.pool.groups[index]
    because = UNKNOWN.format(a.name)
    alike = {"kv_heads": SPLIT_FIELDS["kv_heads"]} if a.kind is b.kind is GroupKind.STATE else SPLIT_FIELDS
    found = [_differs(index, field, a, b, f"{why}, and {because}", bridgeable=False) for field, why in alike.items()]
    if here.stage_ranks == there.stage_ranks:
        return [*found, _heads_differ(index, here, there) if a.kv_heads == b.kv_heads else None]
    if a.kind is not GroupKind.MLA:
        why = f"{because}: give both engines as many ranks"
        found.append(Difference("world_size", _split_as(here), _split_as(there), False, why))
    return found


def _by_sections(index: int, here: BridgeSide, there: BridgeSide) -> list[Difference | None]:
    """Returns the difference of a state's sections, added up over all ranks."""
    totals, others = (
        " ".join(str(section.total_bytes) for section in side.pool.groups[index].sections) for side in (here, there)
    )
    if totals == others:
        return []
    return [
        Difference(_path(index, "sections"), totals, others, False, "states are of other sections, or of other sizes")
    ]


def _packed_otherwise(index: int, here: BridgeSide, there: BridgeSide) -> Difference | None:
    mine, theirs = _shapes(here.pool, index), _shapes(there.pool, index)
    because = UNKNOWN.format(here.pool.groups[index].name)
    why = f"layers, keys and values are packed into regions in another way, and {because}"
    return Difference("pool.regions", _told(mine), _told(theirs), False, why) if mine != theirs else None


def _differs(index: int, field: str, a: Group, b: Group, why: str, *, bridgeable: bool) -> Difference | None:
    values = [getattr(group, field) for group in (a, b)]
    if values[0] == values[1]:
        return None
    here, there = (value.value if isinstance(value, GroupKind) else str(value) for value in values)
    return Difference(_path(index, field), here, there, bridgeable, why)


def _path(group: int, field: str) -> str:
    """Returns the path of a group's field in the schema's description of an engine."""
    return f"pool.groups[{group}].{SCHEMA_NAMES.get(field, field)}"


def holds_tensors(pool: PoolLayout) -> bool:
    """Returns True if a pool is a staging store."""
    return [(g.name, g.kind, g.block_tokens, g.dtype) for g in pool.groups] == [(PAGES, GroupKind.MLA, 1, "uint8")]


def _costs(here: BridgeSide, there: BridgeSide) -> list[Difference]:
    """Returns the cost of moving between unlike pools. A cost that is too high is not bridgeable."""
    found = []
    if _split_as(here) != _split_as(there):
        why = "each rank reads its layers and heads from the ranks that have them"
        found.append(Difference("world_size", _split_as(here), _split_as(there), True, why))
    elif here.pool.fingerprint() == there.pool.fingerprint():
        return []
    pairs = (here.stage_ranks + there.stage_ranks) * sum(
        len(common_stages(here.pool, there.pool, group)) for group in range(len(here.pool.groups))
    )
    if pairs > ROWS_MAX:
        why = f"there are more than {ROWS_MAX} pairs of ranks, counted for each group"
        return [*found, Difference("world_size", _split_as(here), _split_as(there), False, why)]
    counts = [len(side.pool.regions) for side in (here, there)]
    both = Bridge(there, here), Bridge(here, there)
    if sum(counts) * max(len(bridge.pairs) for bridge in both) > ROWS_MAX:
        why = f"there are more than {ROWS_MAX} pairs of regions: describe more layers by one region"
        return [*found, Difference("pool.regions", str(counts[0]), str(counts[1]), False, why)]
    for index, group in enumerate(here.pool.groups):
        mine, theirs = _shapes(here.pool, index), _shapes(there.pool, index)
        texts = [_cost(bridge, index) for bridge in both]
        if mine == theirs and texts == [WHOLE, WHOLE]:
            continue
        why, fits = f"group {group.name}: into here {texts[0]}, into there {texts[1]}", True
        if any(index in b.repacked and b.size_of_block(index, None).nbytes > STAGING_BYTES for b in both):
            why, fits = f"{why}: more than the {STAGING_BYTES} bytes of a staging buffer; choose smaller blocks", False
        found.append(Difference("pool.regions", _told(mine), _told(theirs), fits, why))
    return found


def _split_as(side: BridgeSide) -> str:
    """Returns the ranks of a side as text."""
    return str(side.ranks) if side.pool.stages == 1 else f"{side.pool.stages} stages of {side.stage_ranks}"


def _cost(bridge: Bridge, group: int) -> str:
    """Returns how the blocks of a group are moved, as text."""
    run_bytes = bridge.run_bytes(group)
    if group in bridge.repacked:
        read, moved = bridge.size_of_block(group, None).nbytes, bridge.bytes_of_block(group)
        return f"re-packed in runs of {run_bytes} bytes, for which {read / moved:.3g} times the bytes are read"
    return f"in runs of {run_bytes} bytes" if bridge.cuts_blocks(group) else WHOLE


class Inside(Enum):
    """The knowledge that there is of the inside of a group's blocks."""

    NOTHING = "nothing"
    HEADS = "heads"
    TOKENS = "tokens"


def _inside(pool: PoolLayout, index: int) -> Inside:
    views = [view_of(pool.groups[index], region) for region in pool.by_group[index]]
    if any(view is None for view in views):
        return Inside.NOTHING
    told = [view.tells_tokens for view in views if view is not None]
    return Inside.TOKENS if all(told) else Inside.NOTHING if any(told) else Inside.HEADS


_Shape = tuple[int, int, str, int, Strides | None]


def _shapes(pool: PoolLayout, index: int) -> list[_Shape]:
    """Returns the shape of each region of a group: first layer, layers, tensor, bytes of a block, strides."""
    found = sorted(pool.by_group[index], key=lambda r: (r.first_layer, r.tensor.value))
    return [(r.first_layer, r.layers, r.tensor.value, r.block_bytes, r.strides) for r in found]


def _told(shapes: list[_Shape]) -> str:
    tensors = ", ".join(sorted({tensor for _, _, tensor, _, _ in shapes}))
    strides = {tuple(strides) for *_, strides in shapes if strides is not None}
    laid_out = f", strides {', '.join(map(str, sorted(strides)))}" if strides else ""
    return (
        f"{len(shapes)} regions of {sorted({nbytes for *_, nbytes, _ in shapes})} bytes a block ({tensors}{laid_out})"
    )
