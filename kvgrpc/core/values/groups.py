"""The words of a layout: kinds of groups and tensors, groups of layers, regions of memory. What fits together is
checked in `layout`.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

BYTES_MAX = 2**53 - 1
"""Above any memory; every language can hold it, and no sum of offsets leaves 64 bits."""
LAYERS_MAX = 1 << 16
PAGES = "pages"
"""Name of the one group of a pool that is a staging store of named tensors."""
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
    stand side by side.

    An engine that does not know where tokens are states 0 for `token` and `part`: what one head has in a block stands
    side by side then, in an order of the engine's own. With `head` 0, too, nothing is known of the inside of a block.
    """

    layer: int
    part: int
    """From the keys of a layer to its values."""
    head: int
    token: int
    key_element: int = 0
    """From one element of a key to the next, where the keys of a head stand in columns: of each element those of all
    tokens of the block side by side. `token` is that of values then. 0: keys stand as values do.
    """


class Section(NamedTuple):
    """A part of a state, of which each rank of a stage has its share, in the order of ranks; or several have the same
    one, as many of neighbouring numbers as any other.
    """

    nbytes: int
    """Of a rank."""
    total_bytes: int
    """Of all ranks of a stage, each share once."""


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
    """Elements per head; of a state all of them."""
    dtype: str
    """Element type, by numpy's or torch's name: float32, bfloat16, float8_e4m3fn. Of a state all types that it has."""
    order: str = "token_major"
    """Order inside a block: token_major ([tokens, heads, dim]) or head_major ([heads, tokens, dim])."""
    window_tokens: int = 0
    """Sliding window in tokens; 0 where the group has none."""
    total_kv_heads: int = 0
    """KV heads of the model: each rank has its share of them, or, of fewer heads than ranks, one that others have, too.
    0: as many as all ranks have together. Latents are the same on all ranks, and states are each rank's own: both 0.
    """
    space: str = ""
    """Block space. Groups that name the same one share their block ids, and their layers may alias the same bytes: a
    block belongs to one of these groups at a time. Empty: the group has a space of its own.
    """
    sections: tuple[Section, ...] = ()
    """Of a state: what its bytes are, one after the other. Empty: nothing is known of its inside, and it moves whole,
    between as many ranks.
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
    stage: int = 0
    """The pipeline stage whose ranks have it."""
