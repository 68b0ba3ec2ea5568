"""A push at its source: the parts of a prompt, and every destination to which they go.

Each destination that registers is a move of its own (`Registration`). It may come before, between or after the parts,
and may fail and be replaced while the blocks stay. Its stages are those of `move`. RENDEZVOUS lasts until parts and
registration are there.

Where this side moves the bytes (`writes`), a registration is a reversed pull: its access is one to write. Where the
destination moves them, this side posts nothing. It tells the destination which parts it may read, and the destination
settles.
"""

from dataclasses import dataclass, field

from kvgrpc.core.events import AccessSettling, CloseOutcome, ReadyPart
from kvgrpc.core.state.move import AT_ISSUER, Move, MoveStage
from kvgrpc.core.tables.pins import PinKind, PinTable
from kvgrpc.core.values.block_ids import Blocks, kept_bytes, lists_kept
from kvgrpc.core.values.bridge import Bridge
from kvgrpc.core.values.chunks import Chunk
from kvgrpc.core.values.content import ContentId
from kvgrpc.core.values.parts import Part, Parts, Progress

PUSH_BYTES = 3_000
"""Estimated bytes of a push without its parts, content and destinations."""
DESTINATION_BYTES = 3_000
"""Estimated bytes of an ended destination."""


@dataclass(eq=False)
class SourcePush:
    """Blocks handed over under one transfer key. A push is over when its transfer is."""

    transfer_id: str
    key: bytes
    payer: str
    """The principal whose share of the kept bytes this push uses."""
    cap: float
    """Time at which the push is over, however often it starts over."""
    over: bool = False
    lease_id: str = ""
    """Lease of the present epoch's parts. Empty while there are none."""
    content: ContentId | None = None
    parts: Parts | None = None
    expected: bool = False
    """True when the engine knows the request: it will hand parts over, or say that there are none."""
    handed_over: bool = False
    """True when its one part was handed over to readers. No other part replaces it."""
    part_epoch: int = 0
    """Epoch of the parts. While there are no parts, the lowest epoch that may come."""
    consumers: int = 1
    registrations: "dict[bytes, Registration]" = field(default_factory=dict)
    """All registrations ever made, by their grant's token."""
    finished: set[str] = field(default_factory=set)
    """Destinations, by engine id, that received everything, gave up for good or were cancelled (`Lease.finished`)."""
    received: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)
    """Destinations that gave up. A later lease decides whether they count as finished."""
    cancelled_by: dict[str, str] = field(default_factory=dict)
    """Cancelled destinations -> reason; see `Lease.cancelled_by`."""
    outcome: CloseOutcome = CloseOutcome.DROPPED
    """Outcome of its end for its destinations. CANCELLED means cancelled for both sides, FAILED only for this one."""
    trouble: str = ""
    """Reason why the last failed destination failed."""
    returning: list[str] = field(default_factory=list)
    """Leases of earlier epochs whose blocks our own postings may still read."""

    @property
    def kept_bytes(self) -> int:
        """Estimated bytes, with all destinations that ever came but without the blocks of those that go on."""
        content = 0 if self.content is None else len(self.content.digests)
        parts = 0 if self.parts is None else self.parts.kept_bytes
        return PUSH_BYTES + content + parts + DESTINATION_BYTES * len(self.registrations)

    @property
    def live(self) -> "list[Registration]":
        """Destinations that are not ended, in the order of their arrival."""
        return [found for found in self.registrations.values() if found.stage is not MoveStage.ENDED]

    @property
    def claimed(self) -> bool:
        """True while it still gets parts, has a live destination, or our own postings read its blocks."""
        return self.parts is None or not self.parts.complete or bool(self.live) or self.posting

    @property
    def met(self) -> bool:
        """True when all parts and all destinations have come, so nothing of the push is still to come."""
        engines = {found.claims.engine_id for found in self.registrations.values()}
        engines |= self.dropped | self.cancelled_by.keys()
        return self.parts is not None and self.parts.complete and len(engines) >= self.consumers

    def lacks(self, engine_id: str) -> bool:
        """Returns whether the push goes on and that destination neither has received everything nor is about to."""
        about_to = any(found.claims.engine_id == engine_id for found in self.live)
        return not self.over and not about_to and engine_id not in self.received

    @property
    def all_cancelled(self) -> bool:
        """For a push without parts: True when every known destination was cancelled or has given up. Destinations
        declared before the push started over count as known.
        """
        wanted = 0 if self.content is None else self.consumers
        return not self.live and not self.received and len(self.finished) >= wanted

    @property
    def phase(self) -> str:
        """The phase of its first live destination."""
        return next((found.stage.value for found in self.live), MoveStage.RENDEZVOUS.value)

    @property
    def posting(self) -> bool:
        """True while our own postings may still read its blocks."""
        return any(found.postings for found in self.registrations.values())

    def reads(self, pins: PinTable) -> bool:
        """Returns whether our own postings read blocks that the engine has not taken back."""
        return any(pins.has(found.name, PinKind.ACCESS) for found in self.registrations.values())


@dataclass(eq=False)
class Registration(Move):
    """One destination of a push."""

    push: SourcePush = field(kw_only=True)
    reverse_id: bytes = field(kw_only=True)
    """Id of the READ access for a destination that moves the bytes."""
    progress: Progress | None = None
    """Progress of the destination's target, where this side moves the bytes."""
    ready: int = 0
    """Number of parts that the engine's steps have written. It counts at most one batch beyond the done parts."""
    posted: int = 0
    """Number of parts posted, where this side moves the bytes."""
    told: int = 0
    """Number of parts that the destination knows of, where it moves the bytes."""
    telling: int = 0
    """Number of parts that the destination will know of after its answer. 0 while it is not asked."""
    posted_epoch: int = 0
    """Epoch of the parts that were posted last."""
    replaced: bool = False
    """True when the access is for replaced parts. The next parts need a new access."""

    @property
    def parts(self) -> Parts:
        """Parts of the present epoch, which has some."""
        assert self.push.parts is not None
        return self.push.parts

    @property
    def fresh(self) -> list[Part]:
        """Parts of the next round, where this side moves the bytes."""
        return self.parts.between(self.posted, self.ready)

    @property
    def kept_bytes(self) -> int:
        """Estimated bytes, with the blocks that its own postings read."""
        return super().kept_bytes + (0 if self.opened is None else kept_bytes(lists_kept(self.opened)))

    @property
    def target(self) -> Blocks:
        """Blocks that the destination lets us fill."""
        assert self.opened is not None
        return tuple(ids for _, ids in self.opened.blocks)

    @property
    def fills(self) -> str:
        return self.opened.transfer_id if self.opened is not None else ""

    def pinned(self, pins: PinTable) -> tuple[str, PinKind] | None:
        """Returns the pin on blocks that its postings read, or read in earlier rounds. After an end or a new start, the
        engine may have taken back blocks that are still read.
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

    def settling(self) -> AccessSettling:
        assert self.progress is not None
        self.progress.settle(self.parts, self.posted)
        nbytes = self.nbytes - self.settled_bytes
        return AccessSettling(self.access_id, self.last_round, nbytes, self.posted - 1, self.progress.layers_done)

    def was_told(self, row: AccessSettling) -> bool:
        """Returns whether a reading destination was told of the part that it settles. The last part may be settled
        without `last`: after a checksum mismatch the settle is not the end.
        """
        last = self.parts.complete and row.part == len(self.parts) - 1
        return row.part < max(self.told, self.telling) and (last or not row.last)

    def rows(self) -> tuple[ReadyPart, ...]:
        """Returns the parts that the destination is to be told of."""
        return tuple(self.parts.row(part) for part in self.parts.between(self.told, self.telling))

    def rewind(self) -> None:
        """Discards all progress, because the parts count no more."""
        self.opened = self.progress = None
        self.ready = self.posted = self.told = self.telling = 0
        self.settled_bytes = self.nbytes
        self.rounds += 1
        self.replaced = bool(self.access_id)
