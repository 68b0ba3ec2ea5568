"""A model of a block manager: blocks have reference counts, and the last freed block is given out first."""

import numpy as np

from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.layout import PoolLayout
from sim.rules import Rule, broken


class BlockManager:
    """The blocks in use of an ENGINE_MANAGED pool. Blocks are reused as early as possible, so that races show, also by
    another group of the same block space.
    """

    def __init__(self, pool: PoolLayout) -> None:
        blocks = dict(zip(pool.spaces, (group.blocks for group in pool.groups), strict=True))
        free = [list(range(count)) for count in blocks.values()]
        uses = [[0] * count for count in blocks.values()]
        users = [[-1] * count for count in blocks.values()]
        self._spaces = pool.spaces
        # Groups of one space share the same lists.
        self._free = [free[space] for space in pool.spaces]
        self._uses = [uses[space] for space in pool.spaces]
        self._users = [users[space] for space in pool.spaces]
        """Group that used each block last."""
        self._tokens = [group.block_tokens for group in pool.groups]
        self._layers = [group.layers for group in pool.groups]

    def take(self, tokens: int) -> Blocks | None:
        """Returns blocks for that many tokens, or None if there is no room."""
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
        """Returns the number of missing blocks for that many tokens, for each space that lacks some, under its first
        group.
        """
        missing = {self._spaces.index(space): -len(free) for space, free in zip(self._spaces, self._free, strict=True)}
        for space, size in zip(self._spaces, self._tokens, strict=True):
            missing[self._spaces.index(space)] += -(-tokens // size)
        return tuple((group, count) for group, count in missing.items() if count > 0)

    def share(self, blocks: Blocks) -> Blocks:
        """Adds a reference to blocks in use."""
        for uses, ids in zip(self._uses, blocks, strict=True):
            for block in ids.tolist():
                assert uses[block] > 0
                uses[block] += 1
        return blocks

    def free(self, blocks: Blocks) -> Blocks:
        """Removes a reference; returns the blocks that are not used any more."""
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
        """Returns the request's blocks that lie wholly within its first `tokens` tokens."""
        return tuple(ids[: tokens // size] for ids, size in zip(blocks, self._tokens, strict=True))

    def rest(self, blocks: Blocks, tokens: int) -> Blocks:
        """Returns the other blocks of the request."""
        return tuple(ids[tokens // size :] for ids, size in zip(blocks, self._tokens, strict=True))

    def between(self, blocks: Blocks, first: int, end: int, layers: tuple[int, int] | None) -> Blocks:
        """Returns the request's blocks that begin in tokens [first, end), of groups with the first of `layers`."""
        found = []
        for ids, size, count in zip(blocks, self._tokens, self._layers, strict=True):
            wanted = ids[-(-first // size) : -(-end // size)]
            found.append(wanted if layers is None or layers[0] < count else ids[:0])
        return tuple(found)

    def in_use(self, group: int, block: int) -> bool:
        """Returns True if that group uses the block."""
        return self._uses[group][block] > 0 and self._users[group][block] == group

    def check_idle(self) -> None:
        """Checks that nothing is in use."""
        if any(any(uses) for uses in self._uses):
            broken(Rule.END, "blocks are still in use: they were not given back")
