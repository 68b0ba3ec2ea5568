"""Moves: what a lead knows of a transfer and its access, from the first message to the last posting.

A pull is a move into this engine's blocks, and so is a push that lands here (`reservation`). A push from here
has one move out of these blocks for each destination (`push`). The stages are data:

RENDEZVOUS   a push: the other side, or what it moves, is not known yet
CONNECTING   the peer's lead is being reached
OPENING      OpenAccess is under way at the peer
OPEN         the peer said which blocks; something of this side is missing: blocks, parts, its engine's step
WIRE         postings are in flight
SETTLING     all bytes of the round are there; the peer is asked whether its side held
ENDED        the transfer is over; the object lives on while memory may be accessed for it

A pull has one round of WIRE and SETTLING. A push has as many as its parts need, and returns to RENDEZVOUS when its
prefill starts over.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from operator import itemgetter
from typing import ClassVar, NamedTuple

from kvgrpc.core.actions import Operation
from kvgrpc.core.events import AccessSettling, Opened, PostingEnded
from kvgrpc.core.state.checksum_comparison import ChecksumComparison
from kvgrpc.core.tables.pins import PinKind, PinTable
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.values.block_ids import Blocks, Kept, keeping, kept_bytes, lists_kept
from kvgrpc.core.values.bridge import Bridge
from kvgrpc.core.values.chunks import Chunk
from kvgrpc.core.values.content import ContentClaim
from kvgrpc.core.values.grants import Claims
from kvgrpc.core.values.limits import Limits, bytes_timeout
from kvgrpc.core.values.plans import Pair
from kvgrpc.core.values.slices import RoundSlice
from kvgrpc.core.values.telemetry import MoveTelemetry


class MoveStage(Enum):
    """The stage of a move."""

    # Hashes by identity, as `timers.Timer` does.
    __hash__ = object.__hash__

    RENDEZVOUS = "rendezvous"
    CONNECTING = "handshake"
    OPENING = "open"
    OPEN = "queue"
    WIRE = "wire"
    SETTLING = "settle"
    ENDED = "ended"


STAGES: dict[MoveStage, frozenset[MoveStage]] = {
    MoveStage.RENDEZVOUS: frozenset({MoveStage.OPENING, MoveStage.OPEN, MoveStage.ENDED}),
    MoveStage.CONNECTING: frozenset({MoveStage.OPENING, MoveStage.RENDEZVOUS, MoveStage.ENDED}),
    MoveStage.OPENING: frozenset({MoveStage.OPEN, MoveStage.CONNECTING, MoveStage.RENDEZVOUS, MoveStage.ENDED}),
    MoveStage.OPEN: frozenset({MoveStage.WIRE, MoveStage.SETTLING, MoveStage.RENDEZVOUS, MoveStage.ENDED}),
    MoveStage.WIRE: frozenset({MoveStage.SETTLING, MoveStage.RENDEZVOUS, MoveStage.ENDED}),
    MoveStage.SETTLING: frozenset({MoveStage.OPEN, MoveStage.RENDEZVOUS, MoveStage.ENDED}),
    MoveStage.ENDED: frozenset(),
}
"""Allowed next stages of each stage. The values are the phase names that users see."""

MOVE_BYTES = 5_000
"""Estimated bytes of a move without its token and blocks: its deadlines, its indexes and its row in the ledger."""
PEER_BLOCKS_MAX = 65_536
"""Maximum number of blocks that is believed when a grant states its block count."""
AT_ISSUER = (MoveStage.OPEN, MoveStage.WIRE, MoveStage.SETTLING)
"""Stages in which the move's access is open."""

MOVE_TIMERS = (
    Timer.REGISTRATION,
    Timer.BLOCKS,
    Timer.QUEUE,
    Timer.TRANSFER,
    Timer.SETTLE,
    Timer.SETTLE_RETRY,
    Timer.OPEN_RETRY,
    Timer.PARTS_RETRY,
    Timer.CHECKSUMS_ASK,
    Timer.RENEW,
)


@dataclass(eq=False)
class Move(ABC):
    """One move; see `PullMove`, `ReservationMove` and `Registration`."""

    operation: ClassVar[Operation] = Operation.WRITE
    """Direction of the postings: READ fills this engine's blocks, WRITE fills the peer's."""
    retried_here: ClassVar[bool] = False
    """True when the same call may succeed at this engine after a failure. A push is begun again at its source."""
    transfer_id: str
    token: bytes
    """The grant for the move's access."""
    claims: Claims
    """Claims that identify the other side: those of the grant, or of the peer that opened."""
    access_id: bytes
    """Id of the access at the peer. Empty while there is none."""
    trace: str
    name: str = field(default="", kw_only=True)
    """Prefix of the deadlines' and postings' names. It is the transfer's id where a transfer has one move."""
    leading: bool = field(default=True, kw_only=True)
    """True when the phases of the transfer are those of this move."""
    payer: str = field(default="", kw_only=True)
    """The principal whose share of the kept bytes this move uses."""
    counts_waiting: bool = field(default=True, kw_only=True)
    """True when the transfer timeout also runs while the move waits for its turn."""
    stage: MoveStage = field(default=MoveStage.CONNECTING, kw_only=True)
    transfer_timeout_s: float | None = field(default=None, kw_only=True)
    """Timeout for moving the bytes, in seconds, as the caller stated it. None: it depends on their number."""
    after_step: int = field(default=0, kw_only=True)
    """Engine step that must finish before the next posting."""
    peer: str = field(default="", kw_only=True)
    asked_of: str = field(default="", kw_only=True)
    """The life last asked for the access, which may have opened it. It is kept while the peer is reached again."""
    opened: Opened | None = field(default=None, kw_only=True)
    """The peer's answer to OpenAccess."""
    next_renewal: float = field(default=inf, kw_only=True)
    """Time of the next renewal of the access's lease. Infinite when the move renews none."""
    postings: set[str] = field(default_factory=set, kw_only=True)
    """Postings that may still access memory."""
    unproved: set[str] = field(default_factory=set, kw_only=True)
    """Postings among them that ended without proof that no access follows."""
    writes: bool = field(default=False, kw_only=True)
    """True when the postings write into the peer's blocks."""
    writes_may_land: bool = field(default=False, kw_only=True)
    """True when bytes already sent may still land at the peer, though no posting is in flight here."""
    posted_at: float = field(default=0.0, kw_only=True)
    rounds: int = field(default=0, kw_only=True)
    """Number of rounds that were posted."""
    comparison: ChecksumComparison | None = field(default=None, kw_only=True)
    """Checksums of the round while they are compared."""
    mismatch: str = field(default="", kw_only=True)
    """Text about the first block with a wrong checksum. It counts only if the source's settle is valid."""
    left: list[RoundSlice] | None = field(default=None, kw_only=True)
    """Slices of the round that are not posted yet. None when none are left."""
    expected: int = field(default=0, kw_only=True)
    """Expected bytes over all ranks, as far as known before planning."""
    planned: int = field(default=0, kw_only=True)
    """Planned bytes, over all ranks of the destination."""
    by_pair: "dict[Pair, MovedBytes]" = field(default_factory=dict, kw_only=True)
    """Planned bytes and descriptors of each pair of ranks."""
    nbytes: int = field(default=0, kw_only=True)
    """Bytes moved so far, over all ranks."""
    settled_bytes: int = field(default=0, kw_only=True)
    """Moved bytes whose round is settled."""
    times: dict[str, tuple[float, float]] = field(default_factory=dict, kw_only=True)
    """Posting name -> seconds on the wire, and seconds of these for submitting, summed over its postings."""

    def __post_init__(self) -> None:
        self.name = self.name or self.transfer_id

    def move(self, stage: MoveStage) -> None:
        """Changes the stage. Asserts that `STAGES` allows it."""
        assert stage in STAGES[self.stage], f"{self.stage} to {stage}"
        self.stage = stage

    @property
    def kept_bytes(self) -> int:
        """Estimated bytes, with the peer's blocks. Until the peer has named them, the grant's count is used."""
        if self.opened is None:
            there = 8 * min(self.claims.block_count, PEER_BLOCKS_MAX)
        else:
            there = kept_bytes(lists_kept(self.opened))
        return MOVE_BYTES + 2 * len(self.token) + there

    def bytes_timeout_s(self, nbytes: int, limits: Limits) -> float:
        """Returns the timeout for moving `nbytes` bytes of a rank, in seconds."""
        return bytes_timeout(nbytes, limits) if self.transfer_timeout_s is None else self.transfer_timeout_s

    def moved(self, event: PostingEnded) -> None:
        """Records a posting that moved all its bytes."""
        wire_s, post_s = self.times.get(event.posting_id, (0.0, 0.0))
        self.times[event.posting_id] = wire_s + event.wire_s, post_s + event.post_s
        self.nbytes += event.nbytes

    @property
    def telemetry(self) -> MoveTelemetry | None:
        """Telemetry of this side. None when this side moved nothing."""
        if not self.times:
            return None
        wire_s, post_s = map(max, zip(*self.times.values(), strict=True))
        return MoveTelemetry(self.nbytes, sum([some.descriptors for some in self.by_pair.values()]), wire_s, post_s)

    @property
    def busy(self) -> bool:
        """True while this engine's blocks may still be accessed for the move."""
        return bool(self.postings)

    @property
    def missing_proof(self) -> str:
        """Text that names the proof missing before the blocks are at rest."""
        flying = _ranks(self.postings - self.unproved)
        lost = _ranks(self.unproved)
        return "; ".join(
            [f"the end of the posting of rank {rank}" for rank in flying]
            + [
                f"that the posting of rank {rank}, which its data path lost, accesses nothing more: ReleaseQuarantine "
                "may prove it, or the end of the engine's life"
                for rank in lost
            ]
        )

    @property
    def registration_id(self) -> bytes:
        """Id of the move at a source that has only its grant, while there is no access. Empty when it has none."""
        return b""

    @property
    def fills(self) -> str:
        """The peer's transfer whose blocks the postings fill. Empty when they fill ours."""
        return ""

    @abstractmethod
    def pinned(self, pins: PinTable) -> tuple[str, PinKind] | None:
        """Returns owner and kind of the pin that the move needs now, or None."""

    @property
    @abstractmethod
    def block_count(self) -> int:
        """Number of blocks that the move fills in all."""

    @property
    @abstractmethod
    def last_round(self) -> bool:
        """True when the round being settled is the last one."""

    @abstractmethod
    def chunks(self, bridge: Bridge) -> list[Chunk]:
        """Returns what the next round moves."""

    @abstractmethod
    def begin_round(self) -> None:
        """Marks the next round as begun."""

    @abstractmethod
    def settling(self) -> AccessSettling:
        """Returns the settling of the round that has moved."""


class MovedBytes(NamedTuple):
    """Bytes and descriptors of one pair of ranks in a move."""

    nbytes: int = 0
    descriptors: int = 0


def posting_name(name: str, rank: int, peer_rank: int) -> str:
    """Returns the name of the posting of a rank with a peer's rank. A move has one such posting at a time."""
    return f"{name}/{rank}.{peer_rank}"


def rank_of(posting_id: str) -> int:
    """Returns the rank of this engine that makes a posting."""
    return int(posting_id.rpartition("/")[2].partition(".")[0])


def _ranks(postings: set[str]) -> list[int]:
    return sorted(set(map(rank_of, postings)))


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
