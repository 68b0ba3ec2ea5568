"""The parts of a prompt: both engines cut it alike."""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvgrpc.core.values.content import Item, chain

DOMAIN = b"kvgrpc vllm tensors v1"


@dataclass(frozen=True)
class PromptPart:
    """A run of blocks of a prompt, with the digest of their content."""

    number: int
    first_block: int
    """Index among the blocks of the prompt."""
    blocks: int
    content_digest: bytes


@dataclass(frozen=True)
class Cut:
    """The numbers by which an engine cuts prompts."""

    block_tokens: int
    part_tokens: int
    ranks: int
    """Number of ranks. Each has its share of the heads, so engines with other numbers have other tensors."""


class PromptParts:
    """The parts of one prompt."""

    def __init__(
        self, cut: Cut, ids: Sequence[int], *, adapter: str = "", cache_salt: str = "", items: Sequence[Item] = ()
    ) -> None:
        """Raises InvalidRequest for invalid token ids, OutOfRange (LIMIT_EXCEEDED) for items over too many tokens."""
        self.tokens = len(ids)
        self._cut = cut
        self._content = chain(ids, adapter=adapter, cache_salt=cache_salt, items=items)

    @property
    def parts(self) -> int:
        return -(-self.tokens // self._cut.part_tokens)

    def computed(self, tokens: int) -> int:
        """Returns the number of whole parts once `tokens` tokens are computed."""
        return self.parts if tokens >= self.tokens else tokens // self._cut.part_tokens

    def needed(self, computed_tokens: int) -> range:
        """Returns the parts that an engine with `computed_tokens` tokens lacks, if it computes the last token."""
        return range(computed_tokens // self._cut.part_tokens, -(-(self.tokens - 1) // self._cut.part_tokens))

    def lacking(self, computed_tokens: int) -> range:
        """Returns the blocks that an engine with `computed_tokens` tokens lacks, if it computes the last token."""
        return range(computed_tokens // self._cut.block_tokens, -(-(self.tokens - 1) // self._cut.block_tokens))

    def part(self, number: int) -> PromptPart:
        """Returns a part. Its digest covers all tokens of the prompt up to the part's end."""
        blocks, of = self.blocks(number), self._content.digest(min((number + 1) * self._cut.part_tokens, self.tokens))
        digest = hashlib.sha256(DOMAIN + struct.pack("<I", self._cut.ranks) + of).digest()
        return PromptPart(number, blocks.start, len(blocks), digest)

    def blocks(self, number: int) -> range:
        """Returns the indices of a part's blocks in the prompt."""
        cut, end = self._cut, min((number + 1) * self._cut.part_tokens, self.tokens)
        return range(number * cut.part_tokens // cut.block_tokens, -(-end // cut.block_tokens))
