"""Tracks which physical blocks hold which tokens: references, a free list and a prefix cache.

Standard library only: it hands out block numbers and never sees KV.

1. A block is used while it has references, else free. Free blocks keep their content, and can be
   found by it, until they are recycled; the one that was freed longest ago is recycled first.
2. A request holds one reference on each block of its table, and a KV transfer one more per
   hand-over, so that either may end first.
3. Only full blocks are found, by a hash chain over all tokens up to the block's end, and only after
   `register`: blocks that a transfer is still filling, or that it failed to fill, are not found.
4. A block that others may read is never written. So the last block of a fully cached prompt is not
   shared but computed anew: at least one token is needed for the logits.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class OutOfBlocks(RuntimeError):
    """Raised when there are too few free blocks. Nothing was changed; try again when a request has ended."""


class Allocation(NamedTuple):
    """Blocks of one request. The table covers its tokens, of which the first `cached_tokens` are cached."""

    block_table: list[int]
    cached_tokens: int


def block_keys(token_ids: Sequence[int], block_tokens: int) -> list[bytes]:
    """Returns the key of each full block: SHA-256 over the key before it and its own token ids."""
    keys, key = [], b""
    for end in range(block_tokens, len(token_ids) + 1, block_tokens):
        tokens = struct.pack(f"<{block_tokens}I", *token_ids[end - block_tokens : end])
        key = hashlib.sha256(key + tokens).digest()
        keys.append(key)
    return keys


class BlockManager:
    """Owns the block numbers 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        if num_blocks < 1 or block_tokens < 1:
            raise ValueError(f"{num_blocks} blocks of {block_tokens} tokens")
        self.block_tokens = block_tokens
        self._references = [0] * num_blocks
        self._free = OrderedDict.fromkeys(range(num_blocks))  # in the order of recycling
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def free_blocks(self) -> int:
        """Number of blocks without references, cached or not."""
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        """Number of blocks with at least one reference."""
        return sum(count > 0 for count in self._references)

    def allocate(self, token_ids: Sequence[int]) -> Allocation:
        """Returns blocks for a prompt, one reference each. Its KV is cached up to `cached_tokens`, a multiple of
        block_tokens that is less than the prompt's length.

        Raises OutOfBlocks.
        """
        if not token_ids:
            raise ValueError("a prompt has at least one token")
        cached = self.find(token_ids[:-1])
        self._add_references(cached)
        block_table = list(cached)
        try:
            self.extend(block_table, len(token_ids))
        except OutOfBlocks:
            self.release(cached)
            raise
        return Allocation(block_table, len(cached) * self.block_tokens)

    def find(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the full blocks that hold the KV of these tokens, from the first on."""
        found: list[int] = []
        for key in block_keys(token_ids, self.block_tokens):
            if key not in self._block_of:
                break
            found.append(self._block_of[key])
        return found

    def extend(self, block_table: list[int], tokens: int) -> None:
        """Appends blocks, one reference each, until the table covers `tokens` tokens.

        Raises OutOfBlocks.
        """
        missing = -(-tokens // self.block_tokens) - len(block_table)
        if missing > len(self._free):
            raise OutOfBlocks(f"{missing} blocks needed, {len(self._free)} free")
        for _ in range(missing):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._references[block] = 1
            block_table.append(block)

    def register(self, block_table: Sequence[int], token_ids: Sequence[int]) -> None:
        """Makes the full blocks of a table findable. `token_ids` are those whose KV is written; a token that was
        decoded but not yet fed back has none.

        Content that another block already has stays with that block.
        """
        keys = block_keys(token_ids, self.block_tokens)
        blocks = block_table[: len(keys)]
        if len(blocks) < len(keys):
            raise ValueError(f"{len(keys)} full blocks of tokens, {len(blocks)} in the table")
        self._check_used(blocks)
        for block, key in zip(blocks, keys, strict=True):
            if self._key_of.get(block, key) != key:
                raise ValueError(f"block {block} is registered with other tokens")
        for block, key in zip(blocks, keys, strict=True):
            if self._block_of.setdefault(key, block) == block:
                self._key_of[block] = key

    def hold(self, blocks: Sequence[int]) -> None:
        """Adds one reference to each block. Each must have one already: the content of a free block is unknown."""
        self._check_used(blocks)
        self._add_references(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference from each block. A block without references becomes free.

        The end of a table is recycled before its start, which more prompts share. Blocks that cannot be found are
        recycled first of all.
        """
        self._check_used(blocks)
        if any(count > self._references[block] for block, count in Counter(blocks).items()):
            raise ValueError(f"more references dropped than held: {list(blocks)}")
        for block in reversed(blocks):
            self._references[block] -= 1
            if not self._references[block]:
                self._free[block] = None
                if block not in self._key_of:
                    self._free.move_to_end(block, last=False)

    def forget(self) -> None:
        """Empties the prefix cache of unused blocks: free blocks are not found any more."""
        for block in self._free:
            self._forget(block)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is either free or used, and found by one key."""
        total = len(self._references)
        used = {block for block in range(total) if self._references[block] > 0}
        if min(self._references) < 0 or used & self._free.keys():
            raise AssertionError("a block is both free and used, or has negative references")
        if len(used) + len(self._free) != total:
            raise AssertionError(f"{len(used)} used + {len(self._free)} free != {total} blocks")
        if self._block_of != {key: block for block, key in self._key_of.items()}:
            raise AssertionError("a block and its key do not point at each other")

    def _add_references(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._references[block] += 1
            self._free.pop(block, None)

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]

    def _check_used(self, blocks: Sequence[int]) -> None:
        total = len(self._references)
        unused = [b for b in blocks if not (0 <= b < total and self._references[b])]
        if unused:
            raise ValueError(f"blocks without references: {unused}")
