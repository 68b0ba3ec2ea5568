"""One pull at its destination. Its stages are those of `move`."""

from dataclasses import dataclass, field
from typing import ClassVar

from kvgrpc.core.actions import Operation
from kvgrpc.core.events import Settling
from kvgrpc.core.state.move import Move, Stage
from kvgrpc.core.tables.pins import PinKind, PinTable
from kvgrpc.core.values.bridge import Bridge
from kvgrpc.core.values.chunks import Chunk
from kvgrpc.core.values.content import Claim
from kvgrpc.core.values.descriptors import Blocks
from kvgrpc.core.values.kept_blocks import Kept, keeping, kept_bytes


@keeping("destination")
@dataclass(eq=False)
class Pull(Move):
    """One pull at its destination."""

    operation: ClassVar[Operation] = Operation.READ
    retried_here: ClassVar[bool] = True

    claim: Claim
    queue_timeout_s: float = field(default=0.0, kw_only=True)
    destination: Blocks | None = field(default=None, kw_only=True)
    request_time_us: int = field(default=0, kw_only=True)
    opened_without_blocks: bool = field(default=False, kw_only=True)
    """Its source takes it for a reader that waits, until it is told otherwise."""
    opened_at: float = field(default=0.0, kw_only=True)

    @property
    def kept_bytes(self) -> int:
        target: Kept | None = self.__dict__["_destination"]
        return super().kept_bytes + (0 if target is None else 2 * kept_bytes(target))

    @property
    def moves_nothing(self) -> bool:
        """Its engine has found everything locally."""
        return self.destination is not None and not any(len(ids) for ids in self.destination)

    @property
    def has_parts(self) -> bool:
        """The source has something to read that was not read yet."""
        return True

    def pinned(self, pins: PinTable) -> tuple[str, PinKind] | None:  # noqa: ARG002 - its target is pinned until the end
        if self.destination is None or self.moves_nothing:
            return None
        return self.transfer_id, PinKind.QUARANTINE if self.stage is Stage.ENDED else PinKind.TARGET

    @property
    def block_count(self) -> int:
        assert self.destination is not None
        return sum(len(ids) for ids in self.destination)

    @property
    def last_round(self) -> bool:
        return True

    def chunks(self, bridge: Bridge) -> list[Chunk]:
        assert self.opened is not None
        assert self.destination is not None
        tokens = self.claim.tokens
        begins = tuple(bridge.begins(group, tokens, len(ids)) for group, ids in enumerate(self.destination))
        return [Chunk(tuple(ids for _, ids in self.opened.blocks), self.destination, None, begins)]

    def begin_round(self) -> None:
        """It has one round only."""

    def settling(self) -> Settling:
        return Settling(self.access_id, last=True, nbytes=self.nbytes)
