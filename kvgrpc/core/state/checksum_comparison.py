"""The comparison of the checksums that a round's blocks have at their source and at their destination."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.call import LayerRange
from kvgrpc.core.values.chunks import Chunk
from kvgrpc.core.values.layout import PoolLayout
from kvgrpc.core.values.pieces import RankChecksums, place_of


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
    def complete(self) -> bool:
        """True when all checksums of both sides are there."""
        return self.all_there and not any(awaited.left for awaited in self.here)

    @property
    def parts(self) -> list[Chunk]:
        return [part for parts in self.asks for part in parts]

    @property
    def error(self) -> str:
        return next((awaited.error for awaited in self.here if awaited.error), "")

    @property
    def fits(self) -> bool:
        """True if the source sent as many checksums of each rank as there are here."""
        here, there = self.both()
        return list(map(len, here)) == list(map(len, there))

    def expect(self, ranks: Iterable[int]) -> str:
        """Awaits these ranks' checksums of the next part, and returns the name under which they compute them."""
        name = f"{self.name}.{len(self.here)}"
        self.here.append(RankChecksums(set(ranks)))
        return name

    def difference(self, pool: PoolLayout) -> str:
        """Describes the first block that did not arrive as it is at the source, for checksums that fit; empty if there
        is none.
        """
        here, there = self.both()
        rank = next((rank for rank, both in enumerate(zip(here, there, strict=True)) if both[0] != both[1]), None)
        if rank is None:
            return ""
        mine, theirs = (np.frombuffer(side[rank], dtype="<u4") for side in (here, there))
        number = int(np.argmax(mine != theirs))
        place = place_of(pool, self.parts, number)
        both = f"CRC-32C {int(theirs[number]):08x} at its source, {int(mine[number]):08x} here"
        return f"{int((mine != theirs).sum())} blocks of rank {rank} differ from their source's: {place} ({both})"

    def both(self) -> tuple[list[bytes], list[bytes]]:
        """Returns the checksums of this side and of the source, by rank, in the order of the blocks."""
        return _by_rank([awaited.by_rank() for awaited in self.here]), _by_rank(self.there)


def _by_rank(parts: list[tuple[bytes, ...]]) -> list[bytes]:
    """Joins the checksums of each rank over all parts. Returns [] when the parts name different numbers of ranks."""
    if len({len(part) for part in parts}) != 1:
        return []
    return [b"".join(rank) for rank in zip(*parts, strict=True)]
