"""One push at its destination. Its stages are those of `move`; RENDEZVOUS lasts until the source opened its access.

Either side may move the bytes. Where the source does, nothing is posted here, and its access may write until it is
proved to be at rest: so long the blocks cannot come back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import ClassVar, NamedTuple

from kvgrpc.core.events import PushSource, Settling
from kvgrpc.core.state.pull import Pull
from kvgrpc.core.values.bridge import Bridge
from kvgrpc.core.values.chunks import Chunk
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.content import DIGEST_BYTES, UNIT_TOKENS, Claim
from kvgrpc.core.values.grants import Access as AccessKind, Claims
from kvgrpc.core.values.groups import Group
from kvgrpc.core.values.ids import ACCESS_ID_BYTES
from kvgrpc.core.values.layout import PoolLayout
from kvgrpc.core.values.parts import Parts, Progress
from kvgrpc.errors import Reason


class Refusal(NamedTuple):
    """Why a life of a source may not fill a target."""

    peer: str
    reason: Reason


class Writer(NamedTuple):
    """Who opened an access under which it may write."""

    life: str
    told: tuple[bytes, ...]
    """What that life was to show here then, of which it has shown one."""


@dataclass(eq=False)
class Reservation(Pull):
    """One push at its destination. Before the source opened its access, `claims` name what is known of it."""

    retried_here: ClassVar[bool] = False

    target_id: str = field(kw_only=True)
    """Names its blocks in the WRITE grant."""
    registration_timeout_s: float = field(kw_only=True)
    cap: float = field(kw_only=True)
    """No part is waited for longer than this."""
    write_access: bytes = b""
    """The access that the source opened here last."""
    writers: dict[bytes, Writer] = field(default_factory=dict)
    """Accesses under which a source may write, until that is proved to be over."""
    refused: Refusal | None = None
    """A source that came with other KV than was asked for, and why it was refused."""
    part_epoch: int = 0
    parts: Parts | None = None
    """Those of the source's parts that are known, where this side moves the bytes."""
    progress: Progress | None = None
    """How far they have come."""
    posted: int = 0
    """How many of them were posted."""

    def narrow(self, groups: Sequence[Group], tokens: int) -> None:
        """Its source has other tokens behind these: what it has of the same is all that is wanted."""
        claim = self.claim
        self.unfilled = tuple(group.blocks_of(claim.tokens) - group.blocks_of(tokens) for group in groups)
        self.claim = Claim(tokens, claim.prefix[: tokens // UNIT_TOKENS * DIGEST_BYTES][-DIGEST_BYTES:])

    def begin(self, source: PoolLayout, parts: Parts) -> None:
        """These parts, and more to come, are this side's to move."""
        self.parts = parts
        self.progress = Progress(source, self.claim.tokens)

    def rewind(self) -> None:
        """Nothing of the parts counts any more."""
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

    def settling(self) -> Settling:
        return Settling(self.access_id, self.last_round, self.nbytes - self.settled_bytes, self.posted - 1)


def unknown_source(source: PushSource, key: bytes) -> Claims:
    """What names a source that has not opened anything yet."""
    return Claims(AccessKind.WRITE, source.engine_id, 0, source.address, "", key, 0.0, 0, 0)


def claims_of(source: EngineDescription, key: bytes) -> Claims:
    """What names a source that has opened its access."""
    return Claims(AccessKind.WRITE, source.engine_id, source.incarnation, source.address, "", key, 0.0, 0, 0)
