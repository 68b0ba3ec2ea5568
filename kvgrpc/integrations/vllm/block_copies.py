"""A mirror's copies by the function of vLLM's platform that copies blocks, for devices that are no CUDA device.

vLLM gives its connectors one function for that, the same on every platform: it copies whole blocks of some tensors from
the device to the host or back. So the blocks that the asked-for bytes touch are copied whole. Other bytes of such a
block are of the same transfer: on their way out they are the device's own, and on their way in they are copied again
once their own have come.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from kvgrpc.core.values.block_ids import Ids
from kvgrpc.core.values.layout import PoolLayout

CopyBlocks = Callable[
    [dict[str, torch.Tensor], dict[str, torch.Tensor], list[int], list[int], Literal["h2d", "d2h"]], None
]
"""Copies from the first tensors into those of the same names: the blocks with the first numbers into those with the
second.
"""


@dataclass(frozen=True)
class _Rows:
    """The blocks of one region, and of all regions at its place."""

    offset: int
    stride: int
    nbytes: int
    """Size of each block."""
    blocks: int

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns the blocks as a view, shape [blocks, bytes]."""
        return memory.as_strided((self.blocks, self.nbytes), (self.stride, 1), memory.storage_offset() + self.offset)

    def touched(self, offsets: Ids, nbytes: Ids) -> list[int]:
        """Returns the blocks that have bytes in these runs."""
        first = np.maximum((offsets - self.offset - self.nbytes) // self.stride + 1, 0)
        end = np.minimum((offsets + nbytes - self.offset - 1) // self.stride + 1, self.blocks)
        here = first < end
        steps = np.zeros(self.blocks + 1, dtype=np.int64)
        np.add.at(steps, first[here], 1)
        np.add.at(steps, end[here], -1)
        found: list[int] = np.flatnonzero(np.cumsum(steps)).tolist()
        return found


class BlockCopies:
    """A `Device`: the memory of a worker's cache, whose blocks vLLM's platform copies."""

    def __init__(self, layout: PoolLayout, memory: torch.Tensor) -> None:
        """`memory`: the cache as bytes."""
        self.nbytes = layout.total_bytes
        self.copy: CopyBlocks | None = None
        """The function that copies; set before anything is copied."""
        self._device = memory
        self._host: torch.Tensor | None = None
        longest: dict[tuple[int, int, int], int] = {}
        for region in layout.regions:
            place = region.offset, region.stride_bytes, layout.groups[region.group].blocks
            longest[place] = max(region.block_bytes, longest.get(place, 0))
        self._rows = [_Rows(at, stride, nbytes, blocks) for (at, stride, blocks), nbytes in longest.items()]

    def open(self, mirror: NDArray[np.uint8]) -> None:
        self._host = torch.from_numpy(mirror)

    def to_host(self, offsets: Ids, nbytes: Ids) -> "BlockCopies":
        return self._copied(offsets, nbytes, "d2h")

    def to_device(self, offsets: Ids, nbytes: Ids) -> "BlockCopies":
        return self._copied(offsets, nbytes, "h2d")

    def synchronize(self) -> None:
        torch.get_device_module(self._device.device).synchronize(self._device.device)

    def close(self) -> None:
        self._host = None

    def _copied(self, offsets: Ids, nbytes: Ids, way: Literal["h2d", "d2h"]) -> "BlockCopies":
        assert self._host is not None, "it has no mirror"
        assert self.copy is not None, "vLLM said how to copy"
        alike: dict[tuple[int, ...], list[_Rows]] = {}
        for rows in self._rows:
            alike.setdefault(tuple(rows.touched(offsets, nbytes)), []).append(rows)
        for blocks, some in alike.items():
            if blocks:
                there, here = ({str(row.offset): row.of(side) for row in some} for side in (self._device, self._host))
                source, target = (there, here) if way == "d2h" else (here, there)
                self.copy(source, target, list(blocks), list(blocks), way)
        return self
