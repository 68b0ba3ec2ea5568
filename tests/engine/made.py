"""The tests' pool and the bytes of its blocks, for worker processes, which must import little.

The pool is tiny: 64 blocks of 16 tokens, two layers.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout, uniform_layout

BLOCKS = 64
BLOCK_TOKENS = 16
LAYERS = 2
LAYER_BYTES = 1024
"""Bytes of one block in one layer: K and V, 16 tokens, 2 heads, 8 elements, float16."""


def layout(blocks: int = BLOCKS) -> PoolLayout:
    """Returns the pool of all engines here."""
    group = Group("full", GroupKind.FULL_ATTENTION, LAYERS, BLOCK_TOKENS, blocks, 2, 8, "float16")
    return uniform_layout(group, LAYER_BYTES)


def made_bytes(blocks: Sequence[int], seed: int) -> NDArray[np.uint8]:
    """Returns bytes for blocks, shape [layers, blocks, bytes]. They are the same in every process."""
    return np.random.default_rng(seed).integers(0, 256, (LAYERS, len(blocks), LAYER_BYTES), dtype=np.uint8)
