"""Checks that strides give each byte of a block one meaning, and no byte two."""

from kvgrpc.core.values.groups import ITEM_BYTES, PARTS, Group, GroupKind, Region, Strides, TensorKind


def wrong_strides(group: Group, region: Region, strides: Strides) -> str:
    """Returns why the strides are wrong, or an empty text."""
    if group.kind is GroupKind.STATE or group.dtype not in ITEM_BYTES:
        what = "a state" if group.kind is GroupKind.STATE else f"elements of type {group.dtype}"
        return f"{what} cannot be told apart within a block: state no strides"
    if max(strides) > region.block_bytes or min(strides) < 0:
        return f"lie between 0 and {region.block_bytes}, the bytes of a block"
    if strides.key_element:
        return _wrong_columns(group, region, strides)
    return _wrong_rows(group, region, strides) if any(strides) else ""


def _wrong_rows(group: Group, region: Region, strides: Strides) -> str:
    """Checks strides where the elements of one head of one token are contiguous, or nothing is known of tokens."""
    run_bytes, parts = group.head_dim * ITEM_BYTES[group.dtype], len(PARTS[region.tensor])
    if strides.token:
        counts = (region.layers, parts, group.kv_heads, group.block_tokens)
        return _overlap(strides[:4], counts, run_bytes, region)
    if strides.part or (group.kv_heads > 1 and not strides.head):
        return "with 0 for tokens or heads all that is inside of these is 0, too"
    head_bytes = run_bytes * parts * group.block_tokens
    return _overlap((strides.layer, strides.head), (region.layers, group.kv_heads), head_bytes, region)


def _wrong_columns(group: Group, region: Region, strides: Strides) -> str:
    """Checks strides where keys stand in columns: one head's keys, or values, enclose no bytes of another head."""
    parts, item_bytes = PARTS[region.tensor], ITEM_BYTES[group.dtype]
    if TensorKind.K not in parts:
        return "keys alone stand in columns: state 0 for their elements"
    rows = [(strides.key_element, group.head_dim, group.block_tokens * item_bytes)]
    if TensorKind.V in parts:
        rows.append((strides.token, group.block_tokens, group.head_dim * item_bytes))
    for stride, _, length in rows:
        if stride < length:
            return f"a stride of {stride} bytes lets elements overlap that take {length}"
    end = max(stride * (count - 1) + length for stride, count, length in rows)
    return _overlap(strides[:3], (region.layers, len(parts), group.kv_heads), end, region)


def _overlap(strides: tuple[int, ...], counts: tuple[int, ...], end: int, region: Region) -> str:
    """Returns what is wrong with arrays of these strides and counts, whose elements take `end` bytes."""
    for stride, count in sorted((stride, count) for stride, count in zip(strides, counts, strict=True) if count > 1):
        if stride < end:
            return f"a stride of {stride} bytes lets elements overlap that take {end}"
        end += stride * (count - 1)
    return "" if end <= region.block_bytes else f"reach byte {end} of {region.block_bytes}"
