"""What the tests put into blocks: a module that a process of a test can import in no time."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BLOCKS = 64
BLOCK_TOKENS = 16
LAYERS = 2
LAYER_BYTES = 1024
"""Of one block: K and V, 16 tokens, 2 heads, 8 elements, float16."""


def made_bytes(blocks: Sequence[int], seed: int) -> NDArray[np.uint8]:
    """Bytes for blocks, shape [layers, blocks, bytes]; the same in every process."""
    return np.random.default_rng(seed).integers(0, 256, (LAYERS, len(blocks), LAYER_BYTES), dtype=np.uint8)
