"""Sliding windows, on the demo's engine: layers that see the last tokens only are a group of their own, and of a prompt
only the blocks that its window's end lies in move there.

Each group has its own memory, and the engine one table for both: a number means a block in either. So a table is cut
for each group when it is given, and it is remembered which blocks have nothing in the window's group.
"""

from collections.abc import Sequence
from dataclasses import replace

from examples.minimal_engine.paged import BlockManager
from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout


def split(pool: PoolLayout, window_tokens: int) -> PoolLayout:
    """A pool of one group as that of a model whose every second layer has a window; none: as it is.

    Layers lie where they did. Layer n of the model has the number n // 2 within its group.
    """
    if not window_tokens:
        return pool
    full = replace(pool.groups[0], layers=pool.groups[0].layers // 2)
    window = replace(full, name="window", kind=GroupKind.SLIDING_WINDOW, window_tokens=window_tokens)
    regions = [replace(it, group=it.first_layer % 2, first_layer=it.first_layer // 2) for it in pool.regions]
    return PoolLayout((full, window), tuple(regions), pool.total_bytes)


class GroupBlocks(BlockManager):
    """Gives out numbers that stand for one block in each group."""

    def __init__(self, num_blocks: int, block_tokens: int, groups: Sequence[Group]) -> None:
        super().__init__(num_blocks, block_tokens)
        self._groups = groups
        self._bare: set[int] = set()
        """Blocks without KV in the group with the window: they were before it when their prompt came."""

    def cut(self, table: Sequence[int], tokens: int, have_tokens: int = 0) -> list[Sequence[int]]:
        """For each group the blocks that move of a prompt of `tokens` tokens, to where the first `have_tokens` are."""
        end = -(-tokens // self.block_tokens)
        return [table[group.first_of(tokens) + group.held_of(tokens, have_tokens) : end] for group in self._groups]

    def filled(self, table: Sequence[int], tokens: int, have_tokens: int) -> None:
        """What `cut` says has come into its blocks."""
        self._bare.update(table[have_tokens // self.block_tokens : self._first_of(tokens)])

    def find(self, token_ids: Sequence[int]) -> list[int]:
        """As there, but to where the window has KV. Of two blocks with the same tokens the first stays, bare or not."""
        found = super().find(token_ids)
        while self._bare.intersection(found[self._first_of(len(found) * self.block_tokens) :]):
            found.pop()
        return found

    def number(self, layer: int) -> int:
        """Of a layer of the model within its group: parts of a push have these."""
        return layer // len(self._groups)

    def completes(self, layer: int) -> bool:
        """Whether each group has its layer of that number, once this one is computed."""
        return layer % len(self._groups) == len(self._groups) - 1

    def _first_of(self, tokens: int) -> int:
        """From which block on each group has KV."""
        return max(group.first_of(tokens) for group in self._groups)

    def _forget(self, block: int) -> None:
        super()._forget(block)
        self._bare.discard(block)
