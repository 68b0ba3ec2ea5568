"""Layers that go as one tensor: each tensor has a price, whatever its size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch


@dataclass(frozen=True)
class Stack:
    """Layers that follow each other, and whose blocks are alike. Its tensors have a row for each of them."""

    number: int
    """Of its first layer."""
    layers: tuple[str, ...]

    def name(self, rank: int) -> str:
        """What a rank's tensors of it are called. A rank that is asked in place of another one has none of that name:
        its share of the heads is never taken for the other's. Of how many layers it is their shape says.
        """
        return f"{self.layers[0]} of rank {rank}"

    def gather(self, caches: Mapping[str, torch.Tensor], blocks: Sequence[int]) -> torch.Tensor:
        """A copy of these blocks of all its layers."""
        first = caches[self.layers[0]]
        rows = torch.tensor(blocks, device=first.device)
        made = first.new_empty((len(self.layers), len(blocks), *first.shape[1:]))
        for layer, into in zip(self.layers, made, strict=True):
            torch.index_select(caches[layer], 0, rows, out=into)
        return made

    def scatter(self, caches: Mapping[str, torch.Tensor], blocks: Sequence[int], made: torch.Tensor) -> None:
        """Fills these blocks of all its layers with what `gather` made at another engine."""
        first = caches[self.layers[0]]
        rows = torch.tensor(blocks, device=first.device)
        for layer, some in zip(self.layers, made.to(first.device), strict=True):
            caches[layer].index_copy_(0, rows, some)


def stacks(caches: Mapping[str, torch.Tensor], layers: int) -> list[Stack]:
    """All layers, in their order, at most so many in each."""
    found: list[Stack] = []
    number = 0
    for _, alike in groupby(caches, lambda name: (caches[name].shape[1:], caches[name].dtype)):
        names = tuple(alike)
        for first in range(0, len(names), layers):
            found.append(Stack(number, names[first : first + layers]))
            number += len(found[-1].layers)
    return found
