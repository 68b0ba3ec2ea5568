"""Blocks of the engines of a stage, and what their memory has."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgrpc.core.values.descriptors import Ids

_ODD = np.uint64(0x9E3779B97F4A7C15)


def fill(memory: NDArray[np.uint8], first: int = 0) -> None:
    """Gives every eight bytes a value of their own: those of the places from `first` on."""
    words = memory[: len(memory) // 8 * 8].view(np.uint64)
    np.multiply(np.arange(first, first + len(words), dtype=np.uint64), _ODD, out=words)


def lists(*groups: Ids) -> Any:
    """The blocks of one group, or a list of those of each, as the library takes them: arrays of integers will do for
    lists of them, which types cannot say.
    """
    return groups[0] if len(groups) == 1 else list(groups)
