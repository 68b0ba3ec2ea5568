"""One pull at its destination. Its stages are those of `moves.move`."""

from dataclasses import dataclass, field
from typing import ClassVar

from kvgrpc.core.events import Opened, Settling
from kvgrpc.core.moves.move import Move
from kvgrpc.core.values.chunks import Chunk
from kvgrpc.core.values.content import Claim
from kvgrpc.core.values.descriptors import Blocks


@dataclass(eq=False)
class Pull(Move):
    """One pull at its destination."""

    reads: ClassVar[bool] = True
    retried_here: ClassVar[bool] = True

    claim: Claim
    queue_timeout_s: float = field(default=0.0, kw_only=True)
    destination: Blocks | None = field(default=None, kw_only=True)
    skip: list[int] = field(default_factory=list, kw_only=True)
    """Blocks of each group that the destination holds already."""
    opened: Opened | None = field(default=None, kw_only=True)
    next_renewal: float = field(default=0.0, kw_only=True)

    @property
    def moves_nothing(self) -> bool:
        """Its engine has found everything locally."""
        return self.destination is not None and not any(len(ids) for ids in self.destination)

    @property
    def has_parts(self) -> bool:
        """The source has something to read that was not read yet."""
        return True

    @property
    def block_count(self) -> int:
        assert self.destination is not None
        return sum(len(ids) for ids in self.destination)

    @property
    def last_round(self) -> bool:
        return True

    def chunks(self) -> list[Chunk]:
        assert self.opened is not None
        assert self.destination is not None
        blocks = tuple(ids[skip:] for (_, ids), skip in zip(self.opened.blocks, self.skip, strict=True))
        return [Chunk(blocks, self.destination, None)]

    def begin_round(self) -> None:
        """It has one round only."""

    def settling(self) -> Settling:
        return Settling(self.access_id, last=True, nbytes=self.nbytes)
