"""A pull at its destination. Its stages are those of `move`."""

from dataclasses import dataclass, field
from operator import itemgetter
from typing import ClassVar

from kvgrpc.core.actions import Operation
from kvgrpc.core.events import AccessSettling
from kvgrpc.core.state.move import Move, MoveStage
from kvgrpc.core.tables.pins import PinKind, PinTable
from kvgrpc.core.values.block_ids import Blocks, Kept, keeping, kept_bytes
from kvgrpc.core.values.bridge import Bridge
from kvgrpc.core.values.chunks import Chunk
from kvgrpc.core.values.content import ContentClaim


@keeping("destination")
@dataclass(eq=False)
class PullMove(Move):
    """One pull at its destination."""

    operation: ClassVar[Operation] = Operation.READ
    retried_here: ClassVar[bool] = True

    claim: ContentClaim
    queue_timeout_s: float = field(default=0.0, kw_only=True)
    destination: Blocks | None = field(default=None, kw_only=True)
    request_time_us: int = field(default=0, kw_only=True)
    opened_without_blocks: bool = field(default=False, kw_only=True)
    """True when it opened its access without blocks. Its source treats it as a waiting reader until told otherwise."""
    opened_at: float = field(default=0.0, kw_only=True)
    have_tokens: int = field(default=0, kw_only=True)
    """Number of tokens whose KV its engine has."""
    unfilled: tuple[int, ...] = field(default=(), kw_only=True)
    """Number of last blocks of each group that stay unfilled, because the source has fewer tokens than requested. Empty
    when the source has them all.
    """

    @property
    def kept_bytes(self) -> int:
        target: Kept | None = self.__dict__["_destination"]
        return super().kept_bytes + len(self.claim.prefix) + (0 if target is None else 2 * kept_bytes(target))

    @property
    def tokens(self) -> int:
        """Number of tokens that come or were found locally. Until the source answers, the requested number."""
        return self.claim.tokens if self.opened is None else self.opened.token_count

    @property
    def filled(self) -> Blocks:
        """Blocks that the incoming bytes fill."""
        blocks = self.destination
        assert blocks is not None
        if not self.unfilled:
            return blocks
        if self.tokens <= self.have_tokens:
            return tuple(ids[:0] for ids in blocks)
        pairs = zip(blocks, self.unfilled, strict=True)
        return tuple(ids[: max(len(ids) - count, 0)] for ids, count in pairs)

    @property
    def moves_nothing(self) -> bool:
        """True when its engine has found everything locally."""
        blocks = self.destination
        return blocks is not None and not any(map(len, blocks))

    @property
    def has_parts(self) -> bool:
        """True when the source has something that was not read yet."""
        return True

    def pinned(self, pins: PinTable) -> tuple[str, PinKind] | None:  # noqa: ARG002 - its target is pinned until the end
        if self.destination is None or self.moves_nothing:
            return None
        return self.transfer_id, PinKind.QUARANTINE if self.stage is MoveStage.ENDED else PinKind.TARGET

    @property
    def block_count(self) -> int:
        return sum(map(len, self.filled))

    @property
    def last_round(self) -> bool:
        return True

    def chunks(self, bridge: Bridge) -> list[Chunk]:
        assert self.opened is not None
        filled = self.filled
        tokens = self.tokens
        begins = tuple([bridge.begins(group, tokens, len(ids)) for group, ids in enumerate(filled)])
        return [Chunk(tuple(map(itemgetter(1), self.opened.blocks)), filled, None, begins)]

    def begin_round(self) -> None:
        """Does nothing, because a pull has one round."""

    def settling(self) -> AccessSettling:
        return AccessSettling(self.access_id, last=True, nbytes=self.nbytes)
