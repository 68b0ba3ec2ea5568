"""Moves: what a lead knows of a transfer for which it holds an access, from the first word to the last posting.

A pull is a move into this engine's blocks (`pull`), a push that lands here too (`reservation`), and a push from here
one out of them (`push`: one for each destination). The stages are data:

RENDEZVOUS   a push: the other side, or what it moves, is not known yet
CONNECTING   the peer's lead is being reached
OPENING      OpenAccess is under way at the peer
OPEN         the peer said which blocks; something of this side is missing: blocks, parts, its engine's step
WIRE         postings are in flight
SETTLING     all bytes of the round are there; the peer is asked whether its side held
ENDED        the transfer is over; the object lives on while memory may be accessed for it

A pull has one round of WIRE and SETTLING, a push as many as its parts need. A push whose prefill starts over is back at
RENDEZVOUS.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import ClassVar, NamedTuple

from kvgrpc.core.actions import Operation
from kvgrpc.core.events import Opened, PostingEnded, Settling
from kvgrpc.core.tables.pins import PinKind, PinTable
from kvgrpc.core.tables.timers import Timer
from kvgrpc.core.values.bridge import Bridge
from kvgrpc.core.values.calls import LayerRange
from kvgrpc.core.values.chunks import Chunk
from kvgrpc.core.values.descriptors import Blocks
from kvgrpc.core.values.grants import Claims
from kvgrpc.core.values.kept_blocks import kept_bytes, lists_kept
from kvgrpc.core.values.limits import Limits, bytes_timeout
from kvgrpc.core.values.pieces import RankChecksums
from kvgrpc.core.values.plans import Pair
from kvgrpc.core.values.slices import Slice
from kvgrpc.core.values.telemetry import MoveTelemetry


class Stage(Enum):
    """Where a move is."""

    # As in `timers.Timer`.
    __hash__ = object.__hash__

    RENDEZVOUS = "rendezvous"
    CONNECTING = "handshake"
    OPENING = "open"
    OPEN = "queue"
    WIRE = "wire"
    SETTLING = "settle"
    ENDED = "ended"


STAGES: dict[Stage, frozenset[Stage]] = {
    Stage.RENDEZVOUS: frozenset({Stage.OPENING, Stage.OPEN, Stage.ENDED}),
    Stage.CONNECTING: frozenset({Stage.OPENING, Stage.RENDEZVOUS, Stage.ENDED}),
    Stage.OPENING: frozenset({Stage.OPEN, Stage.CONNECTING, Stage.RENDEZVOUS, Stage.ENDED}),
    Stage.OPEN: frozenset({Stage.WIRE, Stage.SETTLING, Stage.RENDEZVOUS, Stage.ENDED}),
    Stage.WIRE: frozenset({Stage.SETTLING, Stage.RENDEZVOUS, Stage.ENDED}),
    Stage.SETTLING: frozenset({Stage.OPEN, Stage.RENDEZVOUS, Stage.ENDED}),
    Stage.ENDED: frozenset(),
}
"""Which stage may follow which. The values are the names of the phases that people see."""

MOVE_BYTES = 5_000
"""Of one without its token and blocks: with its deadlines, its indexes, and its row in the ledger."""
PEER_BLOCKS_MAX = 65_536
"""Blocks that a grant may say it is of, as far as that is believed."""
AT_ISSUER = (Stage.OPEN, Stage.WIRE, Stage.SETTLING)
"""While a move is there its access is open."""

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
class Comparing:
    """Checksums of one round, of both sides, over its parts in their order."""

    name: str
    asks: list[list[Chunk]]
    """What the source is asked for at once: one after the other."""
    here: list[RankChecksums] = field(default_factory=list)
    """Part by part, as they were posted."""
    there: list[tuple[bytes, ...]] = field(default_factory=list)
    """The answers so far."""

    @property
    def asked(self) -> tuple[tuple[Blocks, LayerRange | None], ...]:
        """The blocks of the source whose checksums come next."""
        return tuple((part.source, part.layers) for part in self.asks[len(self.there)])

    @property
    def all_there(self) -> bool:
        """Whether the source has said everything."""
        return len(self.there) == len(self.asks)

    @property
    def parts(self) -> list[Chunk]:
        return [part for parts in self.asks for part in parts]

    @property
    def error(self) -> str:
        return next((awaited.error for awaited in self.here if awaited.error), "")

    def both(self) -> tuple[list[bytes], list[bytes]]:
        """The checksums of this side and of the source's, by rank, in the order of the blocks."""
        return _by_rank([awaited.by_rank() for awaited in self.here]), _by_rank(self.there)


def _by_rank(parts: list[tuple[bytes, ...]]) -> list[bytes]:
    """One after the other, of every rank; of none where the parts do not name the same number of ranks."""
    if len({len(part) for part in parts}) != 1:
        return []
    return [b"".join(rank) for rank in zip(*parts, strict=True)]


@dataclass(eq=False)
class Move(ABC):
    """One move; see `Pull`, `Reservation` and `Push`."""

    operation: ClassVar[Operation] = Operation.WRITE
    """What its postings do: READ brings bytes into this engine's blocks, WRITE into the peer's."""
    retried_here: ClassVar[bool] = False
    """After a failure the same call may succeed at this engine; a push is begun anew at its source."""
    transfer_id: str
    token: bytes
    """The grant that its access stands on."""
    claims: Claims
    """What names the other side: of the grant, or of the peer that opened."""
    access_id: bytes
    """The access at the peer; empty while there is none."""
    trace: str
    name: str = field(default="", kw_only=True)
    """What its deadlines and postings are named after; the transfer's id, where a transfer has one move."""
    leading: bool = field(default=True, kw_only=True)
    """The phases of its transfer are this one's."""
    payer: str = field(default="", kw_only=True)
    """Whose share of what may be kept it is in."""
    counts_waiting: bool = field(default=True, kw_only=True)
    """Its transfer timeout runs also while it waits for its turn."""
    stage: Stage = field(default=Stage.CONNECTING, kw_only=True)
    transfer_timeout_s: float | None = field(default=None, kw_only=True)
    """How long its bytes may take, as its caller said; None: by their number."""
    after_step: int = field(default=0, kw_only=True)
    """What is to be posted next waits for this step of the engine."""
    peer: str = field(default="", kw_only=True)
    asked_of: str = field(default="", kw_only=True)
    """The life that was asked for its access last, and may have opened it; also while the peer is reached anew."""
    opened: Opened | None = field(default=None, kw_only=True)
    """The peer's answer to its OpenAccess."""
    next_renewal: float = field(default=inf, kw_only=True)
    """When the lease that its access stands on is renewed; infinite while it renews none."""
    postings: set[str] = field(default_factory=set, kw_only=True)
    """Those that may still access memory."""
    unproved: set[str] = field(default_factory=set, kw_only=True)
    """Those of them that have ended, without proof that no access follows."""
    writes: bool = field(default=False, kw_only=True)
    """Its postings write into the peer's blocks."""
    writes_may_land: bool = field(default=False, kw_only=True)
    """What one of its writes sent may still land at the peer, though nothing of it is in flight here."""
    posted_at: float = field(default=0.0, kw_only=True)
    rounds: int = field(default=0, kw_only=True)
    """Rounds that were posted."""
    comparing: Comparing | None = field(default=None, kw_only=True)
    """The checksums of the round, while they are compared."""
    mismatch: str = field(default="", kw_only=True)
    """Which block of the round arrived as something else, as text: it counts only if the source vouches for its side.
    """
    left: list[Slice] | None = field(default=None, kw_only=True)
    """What of the round is still to be posted."""
    expected: int = field(default=0, kw_only=True)
    """Bytes that it will move over all ranks, as far as that is known before they are planned."""
    planned: int = field(default=0, kw_only=True)
    """Bytes that were planned, for each rank of the destination."""
    by_pair: "dict[Pair, Moved]" = field(default_factory=dict, kw_only=True)
    """What each pair of ranks moves of it, as far as that is planned."""
    nbytes: int = field(default=0, kw_only=True)
    """Bytes that have moved, over all ranks."""
    settled_bytes: int = field(default=0, kw_only=True)
    """Those of them whose round is settled."""
    times: dict[str, tuple[float, float]] = field(default_factory=dict, kw_only=True)
    """Of each posting name, over all that moved under it: time on the wire, and of that for submitting."""

    def __post_init__(self) -> None:
        self.name = self.name or self.transfer_id

    def move(self, stage: Stage) -> None:
        """Asserts that the table allows it."""
        assert stage in STAGES[self.stage], f"{self.stage} to {stage}"
        self.stage = stage

    @property
    def kept_bytes(self) -> int:
        """What it weighs, with the blocks of the peer: until the peer has said which, those of its grant."""
        if self.opened is None:
            there = 8 * min(self.claims.block_count, PEER_BLOCKS_MAX)
        else:
            there = kept_bytes(lists_kept(self.opened))
        return MOVE_BYTES + 2 * len(self.token) + there

    def bytes_timeout_s(self, nbytes: int, limits: Limits) -> float:
        """How long so many bytes of a rank may take."""
        return bytes_timeout(nbytes, limits) if self.transfer_timeout_s is None else self.transfer_timeout_s

    def moved(self, event: PostingEnded) -> None:
        """A posting brought all its bytes."""
        wire_s, post_s = self.times.get(event.posting_id, (0.0, 0.0))
        self.times[event.posting_id] = wire_s + event.wire_s, post_s + event.post_s
        self.nbytes += event.nbytes

    @property
    def telemetry(self) -> MoveTelemetry | None:
        """None: this side moved nothing."""
        if not self.times:
            return None
        wire_s, post_s = map(max, zip(*self.times.values(), strict=True))
        return MoveTelemetry(self.nbytes, sum(some.descriptors for some in self.by_pair.values()), wire_s, post_s)

    @property
    def busy(self) -> bool:
        """This engine's blocks may still be accessed for it."""
        return bool(self.postings)

    @property
    def missing_proof(self) -> str:
        """What would prove its blocks at rest, as text."""
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
        """What names it to a source that knows of it by its grant only, while it has no access; empty: none does."""
        return b""

    @property
    def fills(self) -> str:
        """The peer's transfer into whose blocks its postings write; empty where they write into ours."""
        return ""

    @abstractmethod
    def pinned(self, pins: PinTable) -> tuple[str, PinKind] | None:
        """The pin that it has reason for, by owner and kind."""

    @property
    @abstractmethod
    def block_count(self) -> int:
        """Blocks that it moves in all."""

    @property
    @abstractmethod
    def last_round(self) -> bool:
        """The round that is being settled is its last one."""

    @abstractmethod
    def chunks(self, bridge: Bridge) -> list[Chunk]:
        """What the next round moves."""

    @abstractmethod
    def begin_round(self) -> None:
        """The next round begins."""

    @abstractmethod
    def settling(self) -> Settling:
        """What settles the round that has moved."""


class Moved(NamedTuple):
    """What a pair of ranks moves of a move."""

    nbytes: int = 0
    descriptors: int = 0


def posting_name(name: str, rank: int, peer_rank: int) -> str:
    """The posting of a rank, with a rank of the peer, for the present round of a move: they have one at a time."""
    return f"{name}/{rank}.{peer_rank}"


def rank_of(posting_id: str) -> int:
    """The rank of this engine that makes a posting."""
    return int(posting_id.rpartition("/")[2].partition(".")[0])


def _ranks(postings: set[str]) -> list[int]:
    return sorted(set(map(rank_of, postings)))
