"""Block lists of a stage's engines, and the contents of their memory."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgrpc.core.values.block_ids import Ids

_ODD = np.uint64(0x9E3779B97F4A7C15)


def fill(memory: NDArray[np.uint8], first: int = 0) -> None:
    """Gives every eight bytes a distinct value. `first` is the position of the first of them."""
    words = memory[: len(memory) // 8 * 8].view(np.uint64)
    np.multiply(np.arange(first, first + len(words), dtype=np.uint64), _ODD, out=words)


def lists(*groups: Ids) -> Any:
    """Returns the blocks of one group, or a list with those of each, as the library takes them. Integer arrays work as
    lists, which types cannot express.
    """
    return groups[0] if len(groups) == 1 else list(groups)
