"""Tensor parallelism on the demo's engine: each rank has the KV of its share of the heads, in memory of its own.

A model that is split over workers attaches a Rank in each of them, and each writes its own heads there. This engine
computes all heads in one process, which has all ranks, so only the memory is split. Blocks, hand-overs and pulls are
the same as with one rank: a block number means the same block on every rank.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from examples.minimal_engine.model import ModelConfig


class SplitLayer:
    """One layer's KV in the memory of all ranks: for the model a [blocks, 2, block_tokens, kv_heads, head_dim]."""

    def __init__(self, shares: Sequence[Tensor]) -> None:
        """Joins `shares`, each with its part of the heads, in the order of ranks."""
        self._shares = shares
        self.dtype = shares[0].dtype
        self.shape = torch.Size([*shares[0].shape[:-2], sum(share.shape[-2] for share in shares), shares[0].shape[-1]])

    def __getitem__(self, where: Any) -> Tensor:
        return torch.cat([share[where] for share in self._shares], dim=-2)

    def __setitem__(self, where: Any, kv: Tensor) -> None:
        for share, part in zip(self._shares, kv.chunk(len(self._shares), dim=-2), strict=True):
            share[where] = part


def layers_in(memories: Sequence[NDArray[np.uint8]], config: ModelConfig, blocks: int, block_tokens: int) -> list[Any]:
    """Returns the KV of each layer in the memory of one rank, or of several."""
    *shape, kv_heads, head_dim = config.kv_shape(blocks, block_tokens)
    shares = [
        memory.view(np.float32).reshape(config.layers, *shape, kv_heads // len(memories), head_dim)
        for memory in memories
    ]
    split = [[torch.from_numpy(layer) for layer in layers] for layers in zip(*shares, strict=True)]
    return [SplitLayer(layer) if len(layer) > 1 else layer[0] for layer in split]
