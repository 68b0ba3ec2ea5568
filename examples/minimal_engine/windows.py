"""Sliding windows on the demo's engine: layers that see only the last tokens are a group of their own. Only the blocks
at the end of a prompt, within the window, move in that group.

Each group has its own memory, and the engine has one table for both: a number means a block in either. So a table is
cut for each group when it is given, and the manager remembers which blocks have nothing in the window's group.
"""

from collections.abc import Sequence
from dataclasses import replace

from examples.minimal_engine.paged import BlockManager
from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout


def split(pool: PoolLayout, window_tokens: int) -> PoolLayout:
    """Returns a pool of one group as that of a model whose every second layer has a window; unchanged if there is none.

    Layers stay where they are. Layer n of the model has the number n // 2 within its group.
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
        """Blocks without KV in the window's group: they were before the window when their prompt came."""

    def cut(self, table: Sequence[int], tokens: int, have_tokens: int = 0) -> list[Sequence[int]]:
        """Returns for each group the blocks to move of a prompt of `tokens` tokens, if the first `have_tokens` are
        here.
        """
        end = -(-tokens // self.block_tokens)
        return [table[group.first_of(tokens) + group.held_of(tokens, have_tokens) : end] for group in self._groups]

    def filled(self, table: Sequence[int], tokens: int, have_tokens: int) -> None:
        """Takes note that the blocks of `cut` are filled."""
        self._bare.update(table[have_tokens // self.block_tokens : self._first_of(tokens)])

    def find(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the cached blocks up to where the window has KV. Of two blocks with the same tokens the first stays,
        bare or not.
        """
        found = super().find(token_ids)
        while self._bare.intersection(found[self._first_of(len(found) * self.block_tokens) :]):
            found.pop()
        return found

    def number(self, layer: int) -> int:
        """Returns the number of a model's layer within its group, as in parts of a push."""
        return layer // len(self._groups)

    def completes(self, layer: int) -> bool:
        """Returns True if each group has its layer of that number once this layer is computed."""
        return layer % len(self._groups) == len(self._groups) - 1

    def _first_of(self, tokens: int) -> int:
        """Returns the first block from which on each group has KV."""
        return max(group.first_of(tokens) for group in self._groups)

    def _forget(self, block: int) -> None:
        super()._forget(block)
        self._bare.discard(block)
