"""A prompt in parts, which both engines cut alike."""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvgrpc.core.values.content import Item, chain

DOMAIN = b"kvgrpc vllm tensors v1"


@dataclass(frozen=True)
class Part:
    """Some blocks of a prompt, and what their KV is of."""

    number: int
    first_block: int
    """Of the blocks of the prompt."""
    blocks: int
    content_digest: bytes


@dataclass(frozen=True)
class Cut:
    """How an engine cuts prompts."""

    block_tokens: int
    part_tokens: int
    ranks: int
    """Of the engine: each has its share of the heads, so that engines with other numbers have other tensors."""


class Prompt:
    """The parts of one prompt."""

    def __init__(
        self, cut: Cut, ids: Sequence[int], *, adapter: str = "", cache_salt: str = "", items: Sequence[Item] = ()
    ) -> None:
        """Raises InvalidRequest for what are no token ids, or items of none."""
        self.tokens = len(ids)
        self._cut = cut
        self._content = chain(ids, adapter=adapter, cache_salt=cache_salt, items=items)

    @property
    def parts(self) -> int:
        """How many there are."""
        return -(-self.tokens // self._cut.part_tokens)

    def computed(self, tokens: int) -> int:
        """Of how many parts all is computed when so many tokens are."""
        return self.parts if tokens >= self.tokens else tokens // self._cut.part_tokens

    def needed(self, computed_tokens: int) -> range:
        """The parts that hold what an engine lacks that has so many tokens, and computes the last one."""
        return range(computed_tokens // self._cut.part_tokens, -(-(self.tokens - 1) // self._cut.part_tokens))

    def lacking(self, computed_tokens: int) -> range:
        """The same in blocks."""
        return range(computed_tokens // self._cut.block_tokens, -(-(self.tokens - 1) // self._cut.block_tokens))

    def part(self, number: int) -> Part:
        """Its blocks and its content: of all tokens up to its end."""
        blocks, of = self.blocks(number), self._content.digest(min((number + 1) * self._cut.part_tokens, self.tokens))
        digest = hashlib.sha256(DOMAIN + struct.pack("<I", self._cut.ranks) + of).digest()
        return Part(number, blocks.start, len(blocks), digest)

    def blocks(self, number: int) -> range:
        """Which of the prompt's blocks a part has."""
        cut, end = self._cut, min((number + 1) * self._cut.part_tokens, self.tokens)
        return range(number * cut.part_tokens // cut.block_tokens, -(-end // cut.block_tokens))
