"""A modelled block manager: blocks are counted by reference, and the last freed are given out first."""

import numpy as np

from kvgrpc.core.values.descriptors import Blocks
from kvgrpc.core.values.layout import PoolLayout
from kvgrpc.sim.rules import Rule, broken


class BlockManager:
    """Which blocks of an ENGINE_MANAGED pool are in use. Reuse comes as early as it can, so that races show, also by
    another group of the same block space.
    """

    def __init__(self, pool: PoolLayout) -> None:
        blocks = dict(zip(pool.spaces, (group.blocks for group in pool.groups), strict=True))
        free = [list(range(count)) for count in blocks.values()]
        uses = [[0] * count for count in blocks.values()]
        users = [[-1] * count for count in blocks.values()]
        self._spaces = pool.spaces
        # Groups of one space have the same lists.
        self._free = [free[space] for space in pool.spaces]
        self._uses = [uses[space] for space in pool.spaces]
        self._users = [users[space] for space in pool.spaces]
        """The group that used each block last."""
        self._tokens = [group.block_tokens for group in pool.groups]
        self._layers = [group.layers for group in pool.groups]

    def take(self, tokens: int) -> Blocks | None:
        """Blocks for that many tokens, or None when there is no room."""
        if self.lacks(tokens):
            return None
        taken = []
        for group, size in enumerate(self._tokens):
            ids = [self._free[group].pop() for _ in range(-(-tokens // size))]
            for block in ids:
                self._uses[group][block] = 1
                self._users[group][block] = group
            taken.append(np.array(ids, dtype=np.int64))
        return tuple(taken)

    def lacks(self, tokens: int) -> tuple[tuple[int, int], ...]:
        """How many blocks are missing for that many tokens, where some are: of each space, as of its first group."""
        missing = {self._spaces.index(space): -len(free) for space, free in zip(self._spaces, self._free, strict=True)}
        for space, size in zip(self._spaces, self._tokens, strict=True):
            missing[self._spaces.index(space)] += -(-tokens // size)
        return tuple((group, count) for group, count in missing.items() if count > 0)

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
        """Whether a block is used, as one of that group."""
        return self._uses[group][block] > 0 and self._users[group][block] == group

    def check_idle(self) -> None:
        """Nothing is in use."""
        if any(any(uses) for uses in self._uses):
            broken(Rule.END, "blocks are still in use: they were not given back")
