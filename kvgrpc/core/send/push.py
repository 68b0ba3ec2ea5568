"""One push at its source: the parts of a prompt, and every destination to which they go.

Each destination that registers is a move of its own (`Registration`): it may come before, between or after the parts,
fail and be replaced by another, while the blocks stay. Its stages are those of `moves`; RENDEZVOUS lasts until parts
and registration are there.

Where this side moves the bytes (`writes`), a registration goes the way of a pull, with its roles reversed: the access
is one to write. Where the destination does, nothing is posted here: it is told which parts it may read, and it settles.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvgrpc.core.events import Opened, ReadyPart, Settling
from kvgrpc.core.moves.move import Move, MoveTable, Stage
from kvgrpc.core.values.chunks import Chunk
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.content import Content
from kvgrpc.core.values.descriptors import Blocks, check_ids
from kvgrpc.core.values.grants import read_claims
from kvgrpc.core.values.parts import Part, Parts, Progress
from kvgrpc.errors import KVGrpcError


@dataclass(eq=False)
class Push:
    """What is handed over under one transfer key. It is over when its transfer is."""

    transfer_id: str
    key: bytes
    cap: float
    """However often it starts over, it is over by then."""
    over: bool = False
    lease_id: str = ""
    """The lease of the present epoch's parts; empty while there are none."""
    content: Content | None = None
    parts: Parts | None = None
    part_epoch: int = 0
    """Of the parts; while there are none, the lowest that may come."""
    consumers: int = 1
    registrations: "dict[bytes, Registration]" = field(default_factory=dict)
    """All that ever came, by their grant's token."""
    finished: set[str] = field(default_factory=set)
    """Destinations, by engine id, that received everything or gave up for good: see `Lease.finished`."""
    received: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)
    """Those that gave up before there was a lease to say what that means."""
    trouble: str = ""
    """Why the last destination that failed did."""
    returning: list[str] = field(default_factory=list)
    """Leases of earlier epochs whose blocks our own postings may still read."""

    @property
    def live(self) -> "list[Registration]":
        """Destinations for which it is not over, in the order in which they came."""
        return [found for found in self.registrations.values() if found.stage is not Stage.ENDED]

    @property
    def phase(self) -> str:
        """How far it is, for people: the phase of its first destination."""
        return next((found.stage.value for found in self.live), Stage.RENDEZVOUS.value)

    @property
    def posting(self) -> bool:
        """Our own postings may still read its blocks."""
        return any(found.postings for found in self.registrations.values())


@dataclass(eq=False)
class Registration(Move):
    """One destination of a push."""

    push: Push = field(kw_only=True)
    reverse_id: bytes = field(kw_only=True)
    """The READ access for the destination, should it move the bytes."""
    opened: Opened | None = None
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
    """Of the parts that were posted last."""
    settled_bytes: int = 0
    replaced: bool = False
    """Its access is of parts that were replaced: the next ones need a new one."""

    @property
    def parts(self) -> Parts:
        """Of the present epoch, which has some."""
        assert self.push.parts is not None
        return self.push.parts

    @property
    def fresh(self) -> list[Part]:
        """The parts of the next round, where this side moves."""
        return self.parts.between(self.posted, self.ready)

    @property
    def target(self) -> Blocks:
        """What the destination lets us fill."""
        assert self.opened is not None
        return tuple(ids for _, ids in self.opened.blocks)

    @property
    def fills(self) -> str:
        return self.opened.transfer_id if self.opened is not None else ""

    @property
    def block_count(self) -> int:
        return sum(len(ids) for ids in self.target)

    @property
    def last_round(self) -> bool:
        parts = self.push.parts
        return parts is not None and parts.complete and self.posted == len(parts)

    def chunks(self) -> list[Chunk]:
        assert self.opened is not None
        return self.parts.chunks(self.fresh, self.target, self.opened.token_count)

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


class PushTable(MoveTable[Registration]):
    """Pushes and their registrations, until nothing of them is left."""

    def __init__(self) -> None:
        super().__init__()
        self._pushes: dict[str, Push] = {}
        self._by_key: dict[bytes, Push] = {}
        self._by_reader: dict[bytes, Registration] = {}

    def begin(self, push: Push) -> None:
        """A new push."""
        self._pushes[push.transfer_id] = self._by_key[push.key] = push

    def add(self, move: Registration) -> None:
        super().add(move)
        move.push.registrations[move.token] = move
        self._by_reader[move.reverse_id] = move

    def take_ids(self, move: Registration, access_id: bytes, reverse_id: bytes) -> None:
        """Its accesses have these ids from now on."""
        self.index_access(move, access_id)
        del self._by_reader[move.reverse_id]
        move.reverse_id = reverse_id
        self._by_reader[reverse_id] = move

    def remove(self, move: Registration) -> None:
        super().remove(move)
        del self._by_reader[move.reverse_id]
        self.forget(move.push)

    def forget(self, push: Push) -> None:
        """Forgets a push if it is over and nothing of it is left."""
        if push.over and not push.posting:
            self._pushes.pop(push.transfer_id, None)
            if self._by_key.get(push.key) is push:
                del self._by_key[push.key]

    def clear(self) -> None:
        super().clear()
        self._pushes.clear()
        self._by_key.clear()
        self._by_reader.clear()

    def push(self, transfer_id: str) -> Push | None:
        """The push of a transfer."""
        return self._pushes.get(transfer_id)

    @property
    def pushes(self) -> Iterator[Push]:
        """All, oldest first; they may end meanwhile."""
        return iter(list(self._pushes.values()))

    def with_key(self, key: bytes) -> Push | None:
        """The push under a key that is not over."""
        push = self._by_key.get(key)
        return push if push is not None and not push.over else None

    def with_lease(self, lease_id: str) -> Push | None:
        """The push whose present parts are under that lease, which may have ended long ago: its postings go on."""
        return next((push for push in self._pushes.values() if push.lease_id == lease_id), None)

    def with_token(self, token: bytes) -> Registration | None:
        """The registration of a grant."""
        try:
            push = self._by_key.get(read_claims(token).transfer_key)
        except KVGrpcError:
            return None
        return push.registrations.get(token) if push is not None else None

    def of_reader(self, access_id: bytes) -> Registration | None:
        """The registration whose destination reads under that access."""
        return self._by_reader.get(access_id)


def check_target(destination: EngineDescription, content: Content, opened: Opened) -> str:
    """What is wrong with the destination's answer; empty when nothing is. A peer's data proves nothing by itself."""
    groups = destination.pool.groups
    if not 0 < opened.token_count <= content.tokens:
        return f"it takes {opened.token_count} of {content.tokens} tokens"
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
