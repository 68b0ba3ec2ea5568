"""The comparison of checksums: what a round's blocks have here, and what their source says."""

from dataclasses import dataclass, field

from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.call import LayerRange
from kvgrpc.core.values.chunks import Chunk
from kvgrpc.core.values.pieces import RankChecksums


@dataclass(eq=False)
class ChecksumComparison:
    """Checksums of both sides for one round, over its parts in their order."""

    name: str
    asks: list[list[Chunk]]
    """Batches of parts. The source is asked for the checksums of one batch at a time."""
    here: list[RankChecksums] = field(default_factory=list)
    """This side's checksums of each part, in the order of posting."""
    there: list[tuple[bytes, ...]] = field(default_factory=list)
    """The source's answers so far."""

    @property
    def asked(self) -> tuple[tuple[Blocks, LayerRange | None], ...]:
        """The source's blocks in the next batch."""
        return tuple((part.source, part.layers) for part in self.asks[len(self.there)])

    @property
    def all_there(self) -> bool:
        """True when the source has answered for all batches."""
        return len(self.there) == len(self.asks)

    @property
    def parts(self) -> list[Chunk]:
        return [part for parts in self.asks for part in parts]

    @property
    def error(self) -> str:
        return next((awaited.error for awaited in self.here if awaited.error), "")

    def both(self) -> tuple[list[bytes], list[bytes]]:
        """Returns the checksums of this side and of the source, by rank, in the order of the blocks."""
        return _by_rank([awaited.by_rank() for awaited in self.here]), _by_rank(self.there)


def _by_rank(parts: list[tuple[bytes, ...]]) -> list[bytes]:
    """Joins the checksums of each rank over all parts. Returns [] when the parts name different numbers of ranks."""
    if len({len(part) for part in parts}) != 1:
        return []
    return [b"".join(rank) for rank in zip(*parts, strict=True)]
