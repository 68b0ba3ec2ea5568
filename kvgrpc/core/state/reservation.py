"""A push at its destination. Its stages are those of `move`. RENDEZVOUS lasts until the source opened its access.

Either side may move the bytes. Where the source does, nothing is posted here, and the source may write under its access
until that access is proved at rest. The blocks cannot come back before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import ClassVar, NamedTuple

from kvgrpc.core.events import AccessSettling, PushSource
from kvgrpc.core.state.move import MoveStage, PullMove
from kvgrpc.core.tables.peers import Peer
from kvgrpc.core.values.bridge import Bridge
from kvgrpc.core.values.chunks import Chunk
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.content import DIGEST_BYTES, UNIT_TOKENS, ContentClaim
from kvgrpc.core.values.grants import AccessKind, Claims
from kvgrpc.core.values.groups import Group
from kvgrpc.core.values.ids import ACCESS_ID_BYTES
from kvgrpc.core.values.layout import PoolLayout
from kvgrpc.core.values.parts import Parts, Progress
from kvgrpc.errors import Reason


class Refusal(NamedTuple):
    """The refusal of a source that may not fill a target: its life and the reason."""

    peer: str
    reason: Reason


class Writer(NamedTuple):
    """The opener of an access under which it may write."""

    life: str
    told: tuple[bytes, ...]
    """Proofs that this life was told to show when it opened. It has shown one of them."""


@dataclass(eq=False)
class ReservationMove(PullMove):
    """One push at its destination. Before the source opened its access, `claims` contain what is known of it."""

    retried_here: ClassVar[bool] = False

    target_id: str = field(kw_only=True)
    """Name of its blocks in the WRITE grant."""
    registration_timeout_s: float = field(kw_only=True)
    cap: float = field(kw_only=True)
    """Time after which no part is waited for."""
    write_access: bytes = b""
    """The access that the source opened here last."""
    writers: dict[bytes, Writer] = field(default_factory=dict)
    """Accesses under which a source may write, until the contrary is proved."""
    refused: Refusal | None = None
    """A source that was refused because it came with other KV than requested, and the reason."""
    taken_by: str = ""
    """The life that took its registration last. Until one has, the life to which it is bound is a guess."""
    part_epoch: int = 0
    parts: Parts | None = None
    """Known parts of the source, where this side moves the bytes."""
    progress: Progress | None = None
    """Progress of the known parts."""
    posted: int = 0
    """Number of known parts that were posted."""

    def outlives(self, peer: Peer) -> bool:
        """Returns whether it goes on without that dead life: no access was opened, and another life is known to which
        it may go, because this one has not taken it.
        """
        opened = self.stage is not MoveStage.RENDEZVOUS or self.claims.incarnation
        return not opened and self.taken_by != peer.key and bool(self.taken_by or peer.replaced_by)

    def narrow(self, groups: Sequence[Group], tokens: int) -> None:
        """Narrows the request to the first `tokens` tokens, because the source's later tokens differ."""
        claim = self.claim
        self.unfilled = tuple(group.blocks_of(claim.tokens) - group.blocks_of(tokens) for group in groups)
        self.claim = ContentClaim(tokens, claim.prefix[: tokens // UNIT_TOKENS * DIGEST_BYTES][-DIGEST_BYTES:])

    def begin(self, source: PoolLayout, parts: Parts) -> None:
        """Begins to move these parts and those that follow."""
        self.parts = parts
        self.progress = Progress(source, self.claim.tokens)

    def rewind(self) -> None:
        """Discards all progress, because the parts count no more."""
        self.parts = self.progress = None
        self.posted = 0
        self.settled_bytes = self.nbytes
        self.rounds += 1

    @property
    def registration_id(self) -> bytes:
        return b"" if self.write_access else sha256(self.token).digest()[:ACCESS_ID_BYTES]

    @property
    def busy(self) -> bool:
        return bool(self.postings or self.writers)

    @property
    def missing_proof(self) -> str:
        writes = [f"that {who.life} writes no more under access {id_.hex()}" for id_, who in self.writers.items()]
        return "; ".join(filter(None, [super().missing_proof, *writes]))

    @property
    def has_parts(self) -> bool:
        return self.parts is not None and self.posted < len(self.parts)

    @property
    def last_round(self) -> bool:
        return self.parts is not None and self.parts.complete and self.posted == len(self.parts)

    def chunks(self, bridge: Bridge) -> list[Chunk]:
        assert self.parts is not None
        return self.parts.chunks(self.parts.batch(self.posted), self.filled, self.claim.tokens, bridge)

    def begin_round(self) -> None:
        assert self.parts is not None
        self.posted += len(self.parts.batch(self.posted))

    def settling(self) -> AccessSettling:
        return AccessSettling(self.access_id, self.last_round, self.nbytes - self.settled_bytes, self.posted - 1)


def unknown_source(source: PushSource, key: bytes) -> Claims:
    """Returns claims for a source that has not opened anything yet."""
    return Claims(AccessKind.WRITE, source.engine_id, 0, source.address, "", key, 0.0, 0, 0)


def claims_of(source: EngineDescription, key: bytes) -> Claims:
    """Returns claims for a source that has opened its access."""
    return Claims(AccessKind.WRITE, source.engine_id, source.incarnation, source.address, "", key, 0.0, 0, 0)
