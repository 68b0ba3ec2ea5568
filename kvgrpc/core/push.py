"""One push at its source. Its stages are those of `moves`; RENDEZVOUS lasts until parts and registration are there.

Where this side moves the bytes (`writes`), a push goes the way of a pull, with its roles reversed: the access is one
to write. Where the destination does, nothing is posted here: it is told which parts it may read, and it settles.
"""

from dataclasses import dataclass, field

from kvgrpc.core.compatibility import EngineDescription
from kvgrpc.core.content import Content
from kvgrpc.core.descriptors import Runs, check_ids
from kvgrpc.core.events import Opened, ReadyPart, Settling
from kvgrpc.core.grants import Access as AccessKind
from kvgrpc.core.grants import Claims
from kvgrpc.core.moves import Move, MoveTable
from kvgrpc.core.parts import Parts, plan_parts
from kvgrpc.core.pins import Blocks
from kvgrpc.errors import KVGrpcError

UNREGISTERED = Claims(AccessKind.WRITE, "", 0, "", "", b"", 0.0, 0, 0)


@dataclass(eq=False)
class Push(Move):
    """One push at its source."""

    key: bytes = field(kw_only=True)
    reverse_id: bytes = field(kw_only=True)
    """The READ access for the destination, should it move the bytes."""
    lease_id: str = ""
    content: Content | None = None
    parts: Parts | None = None
    part_epoch: int = 0
    writes: bool = False
    opened: Opened | None = None
    ready: int = 0
    """Parts that the engine's steps have written."""
    posted: int = 0
    """Parts that were posted, where this side moves."""
    told: int = 0
    """Parts that the destination knows of, where it moves."""
    telling: int = 0
    """Parts that it will know of when it has answered; 0 while it is not asked."""
    settled_bytes: int = 0
    held: bool = False
    """It is over, and its own postings still read the blocks."""

    @property
    def registered(self) -> bool:
        return bool(self.token)

    @property
    def target(self) -> Blocks:
        """What the destination lets us fill."""
        assert self.opened is not None
        return tuple(ids for _, ids in self.opened.blocks)

    @property
    def block_count(self) -> int:
        return sum(len(ids) for ids in self.target)

    @property
    def last_round(self) -> bool:
        return self.parts is not None and self.parts.complete and self.posted == len(self.parts)

    def runs(self, here: EngineDescription, there: EngineDescription) -> Runs:
        assert self.parts is not None
        assert self.opened is not None
        fresh = self.parts.since(self.posted)[: self.ready - self.posted]
        return plan_parts(fresh, here.pool, there.pool, self.target, self.opened.token_count)

    def begin_round(self) -> None:
        self.posted = self.ready

    def settling(self) -> Settling:
        assert self.parts is not None
        assert self.opened is not None
        self.parts.settle(self.posted)
        done = self.parts.layers_done(self.opened.token_count)
        return Settling(self.access_id, self.last_round, self.nbytes - self.settled_bytes, self.posted - 1, done)

    def rows(self) -> tuple[ReadyPart, ...]:
        """The parts that the destination is to be told of."""
        assert self.parts is not None
        fresh = self.parts.since(self.told)[: self.ready - self.told]
        return tuple(ReadyPart(p.number, tuple(enumerate(p.blocks)), p.layers, p.last) for p in fresh)


class PushTable(MoveTable[Push]):
    """Pushes that are not forgotten; also by their transfer key and by the access of a destination that reads."""

    def __init__(self) -> None:
        super().__init__()
        self._by_key: dict[bytes, Push] = {}
        self._by_reader: dict[bytes, Push] = {}

    def add(self, move: Push) -> None:
        super().add(move)
        self._by_key[move.key] = move
        self._by_reader[move.reverse_id] = move

    def remove(self, move: Push) -> None:
        super().remove(move)
        self._by_reader.pop(move.reverse_id, None)
        if self._by_key.get(move.key) is move:
            del self._by_key[move.key]

    def clear(self) -> None:
        super().clear()
        self._by_key.clear()
        self._by_reader.clear()

    def with_key(self, key: bytes) -> Push | None:
        return self._by_key.get(key)

    def of_reader(self, access_id: bytes) -> Push | None:
        """The push whose destination reads under that access."""
        return self._by_reader.get(access_id)


def check_target(destination: EngineDescription, push: Push, opened: Opened) -> str:
    """What is wrong with the destination's answer; empty when nothing is. A peer's data proves nothing by itself."""
    groups = destination.pool.groups
    assert push.content is not None
    if not 0 < opened.token_count <= push.content.tokens:
        return f"it takes {opened.token_count} of {push.content.tokens} tokens"
    if [group for group, _ in opened.blocks] != list(range(len(groups))):
        return "it does not list every group once"
    for group, (_, ids) in zip(groups, opened.blocks, strict=True):
        if len(ids) > group.blocks_of(opened.token_count):
            return f"group {group.name} lists {len(ids)} blocks for {opened.token_count} tokens"
        try:
            check_ids(ids, group.blocks, f"group {group.name}")
        except KVGrpcError as bad:
            return str(bad)
    return ""
