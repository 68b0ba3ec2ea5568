"""The pool of the tests and what they put into its blocks: for processes of a test, which import little.

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
"""Of one block: K and V, 16 tokens, 2 heads, 8 elements, float16."""


def layout(blocks: int = BLOCKS) -> PoolLayout:
    """The pool of all engines here."""
    group = Group("full", GroupKind.FULL_ATTENTION, LAYERS, BLOCK_TOKENS, blocks, 2, 8, "float16")
    return uniform_layout(group, LAYER_BYTES)


def made_bytes(blocks: Sequence[int], seed: int) -> NDArray[np.uint8]:
    """Bytes for blocks, shape [layers, blocks, bytes]; the same in every process."""
    return np.random.default_rng(seed).integers(0, 256, (LAYERS, len(blocks), LAYER_BYTES), dtype=np.uint8)
