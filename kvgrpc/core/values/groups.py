"""The vocabulary of a layout: kinds of groups and tensors, groups of layers, and regions of memory. `layout` checks
that they fit together.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from kvgrpc.core.values.records import dataclass
from kvgrpc.errors import FieldViolation, InvalidRequest, OutOfRange, Reason

BYTES_MAX = 2**53 - 1
"""Upper bound for sizes and offsets. Every language can hold it, and no sum of offsets leaves 64 bits."""
LAYERS_MAX = 1 << 16
PAGES = "pages"
"""Name of the only group of a staging store of named tensors."""
REGIONS_MAX = 1 << 16


class PoolKind(Enum):
    """The side that decides which blocks are in use."""

    SERVER_MANAGED = "server_managed"
    """The server allocates and frees blocks (AllocateBlocks, FreeBlocks)."""
    ENGINE_MANAGED = "engine_managed"
    """The engine's block manager decides; the server only pins."""


class GroupKind(Enum):
    """The way in which the layers of a group use their blocks."""

    FULL_ATTENTION = "full_attention"
    SLIDING_WINDOW = "sliding_window"
    MLA = "mla"
    STATE = "state"


class TensorKind(Enum):
    """The tensors that a region holds of each of its layers."""

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
"""Content of a region that holds all tensors of its layers."""
PARTS: dict[TensorKind, tuple[TensorKind, ...]] = {
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
    are contiguous.

    An engine that does not know where tokens are states 0 for `token` and `part`. Then the bytes of one head in a block
    are contiguous, in an order of the engine's own. If `head` is 0, too, nothing is known of the inside of a block.
    """

    layer: int
    part: int
    """Distance from the keys of a layer to its values."""
    head: int
    token: int
    key_element: int = 0
    """Distance between elements of a key if the keys of a head stand in columns: one element of all tokens of the block
    side by side, then the next. `token` is then the distance between values. 0: keys stand as values do.
    """


class Section(NamedTuple):
    """A part of a state. Each rank of a stage has one share of it, in rank order. If ranks outnumber shares, each share
    is on the same number of neighbouring ranks.
    """

    nbytes: int
    """Bytes of one rank's share."""
    total_bytes: int
    """Bytes over all ranks of a stage, each share counted once."""


@dataclass(frozen=True)
class Group:
    """Layers that share a block table."""

    name: str
    kind: GroupKind
    layers: int
    """Number of layers of the group; layers are numbered from 0 within the group."""
    block_tokens: int
    """Tokens per block."""
    blocks: int
    """Number of blocks in the group; ids run from 0 to blocks - 1."""
    kv_heads: int
    """KV heads per rank."""
    head_dim: int
    """Elements per head; for a state all its elements."""
    dtype: str
    """Element type, by numpy's or torch's name: float32, bfloat16, float8_e4m3fn. A state lists all its types."""
    order: str = "token_major"
    """Order inside a block: token_major ([tokens, heads, dim]) or head_major ([heads, tokens, dim])."""
    window_tokens: int = 0
    """Sliding window in tokens; 0 if the group has none."""
    total_kv_heads: int = 0
    """KV heads of the model. Each rank has its share; if ranks outnumber heads, several ranks have the same head. 0:
    the heads of all ranks together. Latents, the same on all ranks, and states, each rank's own, have 0.
    """
    space: str = ""
    """Block space. Groups that name the same one share their block ids, and their layers may alias the same bytes: a
    block belongs to one of these groups at a time. Empty: the group has a space of its own.
    """
    sections: tuple[Section, ...] = ()
    """Consecutive parts that make up a state. Empty: its inside is unknown, and it moves whole, between equal numbers
    of ranks.
    """

    def first_of(self, tokens: int) -> int:
        """Returns the index, in token order, of the first block that an engine needs to continue after `tokens` tokens.
        With a window, it is the block of the window's first token, even if the last token is computed again.
        """
        windowed = self.window_tokens and self.kind is not GroupKind.STATE
        return max(tokens - self.window_tokens, 0) // self.block_tokens if windowed else 0

    def blocks_of(self, tokens: int) -> int:
        """Returns the number of blocks that hold `tokens` tokens: all from `first_of` on. A state has at most one."""
        if self.kind is GroupKind.STATE:
            return min(tokens, 1)
        count = -(-tokens // self.block_tokens)
        return count - self.first_of(tokens) if self.window_tokens else count

    def held_of(self, tokens: int, have_tokens: int) -> int:
        """Returns how many blocks of `tokens` tokens, from the first on, are whole once `have_tokens` tokens exist."""
        if self.kind is GroupKind.STATE:
            return 0
        return max(have_tokens // self.block_tokens - self.first_of(tokens), 0)

    def stands_for(self, tokens: int, prefix: int) -> bool:
        """Returns True if the blocks of `tokens` tokens begin with those of the first `prefix` tokens."""
        if prefix == tokens or self.kind is GroupKind.STATE:
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
    """Distances between the elements of a block. None: contiguous, layer after layer, keys before values, and then in
    the group's order.
    """
    stage: int = 0
    """Pipeline stage whose ranks have the region."""

    def holds(self, layers: tuple[int, int]) -> bool:
        """Returns True if the region holds some of `layers` = (first, count).

        Raises InvalidRequest (INVALID_FIELD) if it also holds others: nothing says which bytes of its blocks belong to
        which layer.
        """
        first, end = layers[0], layers[0] + layers[1]
        own_end = self.first_layer + self.layers
        if own_end <= first or end <= self.first_layer:
            return False
        if self.first_layer < first or end < own_end:
            whole = f"take all or none of layers {self.first_layer} to {own_end - 1}, which lie together"
            raise InvalidRequest(
                Reason.INVALID_FIELD,
                "the range of layers cuts a region of the pool",
                violations=(FieldViolation("layers", whole),),
            )
        return True


def check_prefix(groups: Sequence[Group], tokens: int, prefix: int) -> None:
    """Raises OutOfRange (CONTENT_RANGE) if the blocks of `tokens` tokens do not serve the first `prefix` of them."""
    for group in groups:
        if not group.stands_for(tokens, prefix):
            state = group.kind is GroupKind.STATE
            keeps = "one state" if state else f"the last {group.window_tokens} tokens"
            raise OutOfRange(
                Reason.CONTENT_RANGE,
                f"group {group.name} keeps {keeps}: that serves all {tokens} tokens and not the first {prefix} alone",
            )
