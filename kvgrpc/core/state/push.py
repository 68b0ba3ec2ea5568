"""One push at its source: the parts of a prompt, and every destination to which they go.

Each destination that registers is a move of its own (`Registration`): it may come before, between or after the parts,
fail and be replaced by another, while the blocks stay. Its stages are those of `moves`; RENDEZVOUS lasts until parts
and registration are there.

Where this side moves the bytes (`writes`), a registration goes the way of a pull, with its roles reversed: the access
is one to write. Where the destination does, nothing is posted here: it is told which parts it may read, and it settles.
"""

from dataclasses import dataclass, field

from kvgrpc.core.events import CloseOutcome, ReadyPart, Settling
from kvgrpc.core.state.move import AT_ISSUER, Move, Stage
from kvgrpc.core.tables.pins import PinKind, PinTable
from kvgrpc.core.values.bridge import Bridge
from kvgrpc.core.values.chunks import Chunk
from kvgrpc.core.values.content import Content
from kvgrpc.core.values.descriptors import Blocks
from kvgrpc.core.values.kept_blocks import kept_bytes, lists_kept
from kvgrpc.core.values.parts import Part, Parts, Progress

PUSH_BYTES = 3_000
"""Of a push, without its parts, its content and its destinations."""
DESTINATION_BYTES = 3_000
"""Of a destination that is over."""


@dataclass(eq=False)
class Push:
    """What is handed over under one transfer key. It is over when its transfer is."""

    transfer_id: str
    key: bytes
    payer: str
    """Whose share of what may be kept it is in."""
    cap: float
    """However often it starts over, it is over by then."""
    over: bool = False
    lease_id: str = ""
    """The lease of the present epoch's parts; empty while there are none."""
    content: Content | None = None
    parts: Parts | None = None
    expected: bool = False
    """The engine knows the request that it is of: it will hand parts over, or say that there are none."""
    handed_over: bool = False
    """Its one part was handed over to readers: none replaces it."""
    part_epoch: int = 0
    """The epoch of the parts; while there are no parts, the lowest that may come."""
    consumers: int = 1
    registrations: "dict[bytes, Registration]" = field(default_factory=dict)
    """All that ever came, by their grant's token."""
    finished: set[str] = field(default_factory=set)
    """Destinations, by engine id, that received everything, gave up for good or were cancelled (`Lease.finished`)."""
    received: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)
    """Those that gave up before there was a lease to say what that means."""
    cancelled_by: dict[str, str] = field(default_factory=dict)
    """Those that were cancelled, and why: see `Lease.cancelled_by`."""
    outcome: CloseOutcome = CloseOutcome.DROPPED
    """What its end means to its destinations: CANCELLED where it was cancelled for both sides, FAILED where only for
    this one.
    """
    trouble: str = ""
    """Why the last destination that failed did."""
    returning: list[str] = field(default_factory=list)
    """Leases of earlier epochs whose blocks our own postings may still read."""

    @property
    def kept_bytes(self) -> int:
        """What it weighs, with all destinations that ever came, and without the blocks of those that go on."""
        content = 0 if self.content is None else len(self.content.digests)
        parts = 0 if self.parts is None else self.parts.kept_bytes
        return PUSH_BYTES + content + parts + DESTINATION_BYTES * len(self.registrations)

    @property
    def live(self) -> "list[Registration]":
        """Destinations for which it is not over, in the order in which they came."""
        return [found for found in self.registrations.values() if found.stage is not Stage.ENDED]

    @property
    def claimed(self) -> bool:
        """It still gets parts, or has a destination, or our own postings read its blocks."""
        return self.parts is None or not self.parts.complete or bool(self.live) or self.posting

    @property
    def met(self) -> bool:
        """All parts and all destinations have come: nothing of it is on its way."""
        engines = {found.claims.engine_id for found in self.registrations.values()}
        engines |= self.dropped | self.cancelled_by.keys()
        return self.parts is not None and self.parts.complete and len(engines) >= self.consumers

    def lacks(self, engine_id: str) -> bool:
        """It goes on, and that destination neither has received everything nor is about to."""
        about_to = any(found.claims.engine_id == engine_id for found in self.live)
        return not self.over and not about_to and engine_id not in self.received

    @property
    def all_cancelled(self) -> bool:
        """Without parts: every destination that is known, or was declared before it started over, was cancelled, or has
        given up.
        """
        wanted = 0 if self.content is None else self.consumers
        return not self.live and not self.received and len(self.finished) >= wanted

    @property
    def phase(self) -> str:
        """How far it is, as text: the phase of its first destination."""
        return next((found.stage.value for found in self.live), Stage.RENDEZVOUS.value)

    @property
    def posting(self) -> bool:
        """Our own postings may still read its blocks."""
        return any(found.postings for found in self.registrations.values())

    def reads(self, pins: PinTable) -> bool:
        """Our own postings still read its blocks, as far as the engine has not taken them back."""
        return any(pins.has(found.name, PinKind.ACCESS) for found in self.registrations.values())


@dataclass(eq=False)
class Registration(Move):
    """One destination of a push."""

    push: Push = field(kw_only=True)
    reverse_id: bytes = field(kw_only=True)
    """The READ access for the destination, should it move the bytes."""
    progress: Progress | None = None
    """How far the destination's target is filled, where this side moves."""
    ready: int = 0
    """Parts that the engine's steps have written, up to as many as move, or are told, at once."""
    posted: int = 0
    """Parts that were posted, where this side moves."""
    told: int = 0
    """Parts that the destination knows of, where it moves."""
    telling: int = 0
    """Parts that it will know of when it has answered; 0 while it is not asked."""
    posted_epoch: int = 0
    """The epoch of the parts that were posted last."""
    replaced: bool = False
    """Its access is of parts that were replaced: the next ones need a new one."""

    @property
    def parts(self) -> Parts:
        """The parts of the present epoch, which has some."""
        assert self.push.parts is not None
        return self.push.parts

    @property
    def fresh(self) -> list[Part]:
        """The parts of the next round, where this side moves."""
        return self.parts.between(self.posted, self.ready)

    @property
    def kept_bytes(self) -> int:
        """With the blocks that its own postings read."""
        return super().kept_bytes + (0 if self.opened is None else kept_bytes(lists_kept(self.opened)))

    @property
    def target(self) -> Blocks:
        """What the destination lets us fill."""
        assert self.opened is not None
        return tuple(ids for _, ids in self.opened.blocks)

    @property
    def fills(self) -> str:
        return self.opened.transfer_id if self.opened is not None else ""

    def pinned(self, pins: PinTable) -> tuple[str, PinKind] | None:
        """What its postings read, and have read in the rounds before. When it is over, or starts over, the engine may
        have taken back what they still read.
        """
        kind = PinKind.ACCESS
        reads = self.posted if self.stage in AT_ISSUER else self.postings and pins.has(self.name, kind)
        return (self.name, kind) if reads else None

    @property
    def block_count(self) -> int:
        return sum(len(ids) for ids in self.target)

    @property
    def last_round(self) -> bool:
        parts = self.push.parts
        return parts is not None and parts.complete and self.posted == len(parts)

    def chunks(self, bridge: Bridge) -> list[Chunk]:
        assert self.opened is not None
        return self.parts.chunks(self.fresh, self.target, self.opened.token_count, bridge)

    def begin_round(self) -> None:
        self.posted = self.ready

    def settling(self) -> Settling:
        assert self.progress is not None
        self.progress.settle(self.parts, self.posted)
        nbytes = self.nbytes - self.settled_bytes
        return Settling(self.access_id, self.last_round, nbytes, self.posted - 1, self.progress.layers_done)

    def rows(self) -> tuple[ReadyPart, ...]:
        """The parts that the destination is to be told of."""
        return tuple(self.parts.row(part) for part in self.parts.between(self.told, self.telling))

    def rewind(self) -> None:
        """Nothing of the parts counts any more."""
        self.opened = self.progress = None
        self.ready = self.posted = self.told = self.telling = 0
        self.settled_bytes = self.nbytes
        self.rounds += 1
        self.replaced = bool(self.access_id)
