"""Strided views of blocks. Exchange between engines with unlike layouts is built on them.

A block of one region is an array [layers, keys and values, heads, tokens] of runs: the elements of one head of one
token.
"""

from kvgrpc.core.values.groups import PARTS
from kvgrpc.core.values.layout import ITEM_BYTES, Group, GroupKind, Region, Strides, TensorKind
from kvgrpc.core.values.records import dataclass


@dataclass(frozen=True)
class View:
    """A block of one region, as an array."""

    first_layer: int
    layers: int
    first_part: int
    """First part that the region holds. 0: keys, or latents; 1: values."""
    parts: int
    heads: int
    tokens: int
    run_bytes: int
    """Contiguous bytes of one head of one token; of one whole head if tokens cannot be told apart."""
    strides: Strides
    elements: int
    """Elements of one head of one token."""

    @property
    def tells_tokens(self) -> bool:
        """True if the place of each token of a head is known."""
        return _tells_tokens(self.strides)

    def inner(self, part: int) -> tuple[int, int]:
        """Returns the bytes from one token of a head to the next, and from one element of a token to the next."""
        item_bytes = self.run_bytes // self.elements
        if self.strides.key_element and part == 0:
            return item_bytes, self.strides.key_element
        return self.strides.token, item_bytes


def view_of(group: Group, region: Region) -> View | None:
    """Returns the view of a block of a region, or None if nothing is known of its inside and it is moved whole."""
    if group.kind is GroupKind.STATE or group.dtype not in ITEM_BYTES:
        return None
    first_part, parts = int(region.tensor is TensorKind.V), len(PARTS[region.tensor])
    run_bytes = group.head_dim * ITEM_BYTES[group.dtype]
    strides = region.strides or _packed(group, parts, run_bytes)
    if not _tells_tokens(strides):
        head_bytes = run_bytes * parts * group.block_tokens
        known = strides.head or (group.kv_heads == 1 and any(strides))
        whole = View(region.first_layer, region.layers, first_part, 1, group.kv_heads, 1, head_bytes, strides, 1)
        return whole if known else None
    if region.strides is None and strides.layer * region.layers != region.block_bytes:
        return None
    layers, rows = (region.first_layer, region.layers), (group.kv_heads, group.block_tokens)
    return View(*layers, first_part, parts, *rows, run_bytes, strides, group.head_dim)


def _tells_tokens(strides: Strides) -> bool:
    return bool(strides.token or strides.key_element)


def _packed(group: Group, parts: int, run_bytes: int) -> Strides:
    heads, tokens = group.kv_heads, group.block_tokens
    part = run_bytes * heads * tokens
    if group.order == "head_major":
        return Strides(part * parts, part, run_bytes * tokens, run_bytes)
    return Strides(part * parts, part, run_bytes, run_bytes * heads)
