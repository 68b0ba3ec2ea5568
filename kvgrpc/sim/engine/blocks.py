"""A modelled block manager: blocks are counted by reference, and the last freed are given out first."""

import numpy as np

from kvgrpc.core.values.descriptors import Blocks
from kvgrpc.core.values.layout import PoolLayout
from kvgrpc.sim.rules import Rule, broken


class BlockManager:
    """Which blocks of an ENGINE_MANAGED pool are in use. Reuse comes as early as it can, so that races show."""

    def __init__(self, pool: PoolLayout) -> None:
        self._free = [list(range(group.blocks)) for group in pool.groups]
        self._uses = [[0] * group.blocks for group in pool.groups]
        self._tokens = [group.block_tokens for group in pool.groups]
        self._layers = [group.layers for group in pool.groups]

    def take(self, tokens: int) -> Blocks | None:
        """Blocks for that many tokens, or None when there is no room."""
        counts = [-(-tokens // size) for size in self._tokens]
        if any(count > len(free) for count, free in zip(counts, self._free, strict=True)):
            return None
        taken = []
        for free, uses, count in zip(self._free, self._uses, counts, strict=True):
            ids = [free.pop() for _ in range(count)]
            for block in ids:
                uses[block] = 1
            taken.append(np.array(ids, dtype=np.int64))
        return tuple(taken)

    def lacks(self, tokens: int) -> tuple[tuple[int, int], ...]:
        """How many blocks of each group are missing for that many tokens, where some are."""
        counts = enumerate(-(-tokens // size) for size in self._tokens)
        return tuple(
            (group, count - len(self._free[group])) for group, count in counts if count > len(self._free[group])
        )

    def share(self, blocks: Blocks) -> Blocks:
        """One more reference to blocks in use."""
        for uses, ids in zip(self._uses, blocks, strict=True):
            for block in ids.tolist():
                assert uses[block] > 0
                uses[block] += 1
        return blocks

    def free(self, blocks: Blocks) -> Blocks:
        """One reference less; returns the blocks that are not used any more."""
        unused = []
        for free, uses, ids in zip(self._free, self._uses, blocks, strict=True):
            gone = []
            for block in ids.tolist():
                if not uses[block]:
                    broken(Rule.R1, f"block {block} is freed twice")
                uses[block] -= 1
                if not uses[block]:
                    gone.append(block)
            free.extend(gone)
            unused.append(np.array(gone, dtype=np.int64))
        return tuple(unused)

    def first(self, blocks: Blocks, tokens: int) -> Blocks:
        """Those of a request's blocks that lie wholly within its first `tokens` tokens."""
        return tuple(ids[: tokens // size] for ids, size in zip(blocks, self._tokens, strict=True))

    def rest(self, blocks: Blocks, tokens: int) -> Blocks:
        """The others."""
        return tuple(ids[tokens // size :] for ids, size in zip(blocks, self._tokens, strict=True))

    def between(self, blocks: Blocks, first: int, end: int, layers: tuple[int, int] | None) -> Blocks:
        """Those of a request's blocks that begin from token `first` on and before `end`, in groups with such layers."""
        found = []
        for ids, size, count in zip(blocks, self._tokens, self._layers, strict=True):
            wanted = ids[-(-first // size) : -(-end // size)]
            found.append(wanted if layers is None or layers[0] < count else ids[:0])
        return tuple(found)

    def in_use(self, group: int, block: int) -> bool:
        """Whether a block is used."""
        return self._uses[group][block] > 0

    def check_idle(self) -> None:
        """Nothing is in use."""
        if any(any(uses) for uses in self._uses):
            broken(Rule.END, "blocks are still in use: they were not given back")
