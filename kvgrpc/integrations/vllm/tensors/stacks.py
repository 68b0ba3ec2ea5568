"""Stacks of layers. A stack moves as one tensor, since each tensor has a cost, whatever its size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch


@dataclass(frozen=True)
class Stack:
    """Consecutive layers whose blocks are alike. The stack's tensors have a row for each layer."""

    number: int
    """Number of the first layer."""
    layers: tuple[str, ...]

    def name(self, rank: int) -> str:
        """Returns the name of a rank's tensors of this stack. The rank is in it, so that one rank's share of the heads
        is never taken for another's. The number of layers is in the tensors' shape.
        """
        return f"{self.layers[0]} of rank {rank}"

    def gather(self, caches: Mapping[str, torch.Tensor], blocks: Sequence[int]) -> torch.Tensor:
        """Returns a copy of these blocks of all layers of the stack."""
        first = caches[self.layers[0]]
        rows = torch.tensor(blocks, device=first.device)
        made = first.new_empty((len(self.layers), len(blocks), *first.shape[1:]))
        for layer, into in zip(self.layers, made, strict=True):
            torch.index_select(caches[layer], 0, rows, out=into)
        return made

    def scatter(self, caches: Mapping[str, torch.Tensor], blocks: Sequence[int], made: torch.Tensor) -> None:
        """Fills these blocks of all layers with what `gather` made at another engine."""
        first = caches[self.layers[0]]
        rows = torch.tensor(blocks, device=first.device)
        for layer, some in zip(self.layers, made.to(first.device), strict=True):
            caches[layer].index_copy_(0, rows, some)
        if made.is_cuda:  # it was made on another stream, which would reuse its memory before these copies have read it
            cuda: Any = torch.cuda  # untyped in part
            made.record_stream(cuda.current_stream(made.device))


def stacks(caches: Mapping[str, torch.Tensor], layers: int) -> list[Stack]:
    """Returns the stacks of all layers in order, each with at most `layers` layers."""
    found: list[Stack] = []
    number = 0
    for _, alike in groupby(caches, lambda name: (caches[name].shape[1:], caches[name].dtype)):
        names = tuple(alike)
        for first in range(0, len(names), layers):
            found.append(Stack(number, names[first : first + layers]))
            number += len(found[-1].layers)
    return found
