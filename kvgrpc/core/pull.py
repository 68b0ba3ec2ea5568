"""One pull at its destination, and what each kind of failure means. Its stages are those of `moves`."""

from dataclasses import dataclass, field

from kvgrpc.core.chunks import Chunk
from kvgrpc.core.content import Claim
from kvgrpc.core.events import Opened, Settling
from kvgrpc.core.moves import Move
from kvgrpc.core.pins import Blocks
from kvgrpc.core.timers import Timer
from kvgrpc.core.transfers import Failure, Next, Side
from kvgrpc.errors import Reason

NEXT_STEPS: dict[Reason, Next] = {
    Reason.CONTENT_MISMATCH: Next.FIX_REQUEST,
    Reason.CONTENT_RANGE: Next.FIX_REQUEST,
    Reason.CONTENT_REQUIRED: Next.FIX_REQUEST,
    Reason.GRANT_INVALID: Next.FIX_REQUEST,
    Reason.GRANT_FOREIGN: Next.FIX_REQUEST,
    Reason.GRANT_WRONG_ACCESS: Next.FIX_REQUEST,
    Reason.ACCESS_REUSED: Next.FIX_REQUEST,
    Reason.DIAL_REFUSED: Next.FIX_REQUEST,
    Reason.INCOMPATIBLE_POOLS: Next.RETRY_OTHER_CONSUMER,
    Reason.PROTOCOL_UNSUPPORTED: Next.RETRY_OTHER_CONSUMER,
    Reason.NO_DATA_PATH: Next.RETRY_OTHER_CONSUMER,
    Reason.PEER_UNREACHABLE: Next.RETRY_OTHER_CONSUMER,
    Reason.QUEUE_TIMEOUT: Next.RETRY_HERE,
    Reason.TRANSFER_TIMEOUT: Next.RETRY_HERE,
    Reason.SETTLE_TIMEOUT: Next.RETRY_HERE,
    Reason.DATA_PATH_FAILED: Next.RETRY_HERE,
    Reason.CHECKSUM_MISMATCH: Next.RETRY_HERE,
    Reason.DEADLINE: Next.RETRY_HERE,
}
"""What would help after a failed pull; RECOMPUTE where nothing is listed."""

LOST_SOURCE = frozenset(
    {
        Reason.LEASE_EXPIRED,
        Reason.LEASE_RELEASED,
        Reason.LEASE_VOIDED,
        Reason.LEASE_NOT_FOUND,
        Reason.INCARNATION_CHANGED,
    }
)
"""Answers to a renewal that mean the blocks are gone."""


@dataclass(eq=False)
class Pull(Move):
    """One pull at its destination."""

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


TIMEOUTS = {
    Timer.REGISTRATION: (Reason.REGISTRATION_TIMEOUT, "the other side of the push did not come, or not with all parts"),
    Timer.BLOCKS: (Reason.QUEUE_TIMEOUT, "no blocks were given for it within the cap of its lease"),
    Timer.QUEUE: (Reason.QUEUE_TIMEOUT, "it waited too long in phase {phase}"),
    Timer.TRANSFER: (Reason.TRANSFER_TIMEOUT, "the bytes took longer than the transfer timeout"),
    Timer.SETTLE: (Reason.SETTLE_TIMEOUT, "the other side did not say in time whether the bytes are valid"),
}

OWN_FAILURES = frozenset(
    {
        Reason.QUEUE_TIMEOUT,
        Reason.TRANSFER_TIMEOUT,
        Reason.DATA_PATH_FAILED,
        Reason.DIAL_REFUSED,
        Reason.NO_DATA_PATH,
    }
)
"""Reasons that lie at the side that moves the bytes."""


def move_failure(move: Move, reason: Reason, message: str, rank: int | None = None) -> Failure:
    """The failure of a move in its present stage. Only a pull can be tried again here."""
    reads = isinstance(move, Pull)
    side = Side.DESTINATION if (reason in OWN_FAILURES) is reads else Side.SOURCE
    step = NEXT_STEPS.get(reason, Next.RECOMPUTE)
    if type(move) is not Pull and step is Next.RETRY_HERE:
        step = Next.RECOMPUTE
    return Failure(reason, message, move.stage.value, side, rank, step)
