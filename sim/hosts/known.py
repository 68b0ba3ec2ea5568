"""A liar's knowledge and inventions: ids, grants, contents, blocks and descriptions that it has seen, and others.

All of it passes the edge of a real lead (`kvgrpc/wire`), which guarantees only this. Block ids, groups, layers, parts,
epochs, token counts and generations are uint32. Block lists are together no longer than the limit of a request, and
layer ranges are not empty. Bytes are uint64; durations are finite, of either sign; texts have at most 256 bytes.
Incarnations are not 0, an engine has 1 to 4096 ranks, and layouts are valid for `PoolLayout`. Access ids and grant
tokens are any bytes.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np

from kvgrpc.core.events import LeaseRef, OpenAccess, ReadyPart, RegisterPush, RenewLeases
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.tables.peers import Peer
from kvgrpc.core.values.block_ids import BlockLists, Ids
from kvgrpc.core.values.call import LayerRange
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.content import ContentId
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.core.values.grants import AccessKind, mint, signing_key
from kvgrpc.core.values.ids import ACCESS_ID_BYTES, peer_key
from kvgrpc.core.values.layout import BYTES_MAX, PoolLayout
from kvgrpc.core.values.sends import MEET, SendAsk
from kvgrpc.errors import BY_CODE, InvalidRequest, KVGrpcError, Reason
from sim.checks.lease_times import claims_of
from sim.world.network import Persona
from sim.world.surroundings import Surroundings

UINT32 = (1 << 32) - 1
UINT64 = (1 << 64) - 1
ERRORS = tuple(BY_CODE.values())
REASONS = tuple(Reason)
NUMBERS = (0, 1, 2, 3, 7, 16, 1_000, UINT32)
SECONDS = (0.0, -1.0, -3e11, 1e-9, 0.05, 1.0, 30.0, 3e11)
NO_ENGINE = "engine-of-nobody"
SHARED = 0.5
"""Share of false lists with a block in two groups, if groups share their blocks."""
FORGED = 8
"""One in this many grants that a liar shows is forged."""
NAME_CHARS = 64
"""Maximum length of a name in a forged grant."""
KEPT = 64
"""Number of things of each kind that a liar remembers."""


class Known:
    """Knowledge of one liar, whose host is at `address`."""

    def __init__(self, address: str, world: Surroundings, rng: Random) -> None:
        self.rng = rng
        self._address = address
        self._world = world
        self.tokens: deque[bytes] = deque(maxlen=KEPT)
        """Grants that the liar holds, and its own that came back. A grant is valid for any bearer."""
        self.texts: deque[str] = deque(("", "t-0", "x" * 256), maxlen=KEPT)
        """Ids of transfers and leases."""
        self.contents: deque[ContentId] = deque(maxlen=KEPT)
        self.openings: deque[AccessOpening] = deque(maxlen=KEPT)
        self.lives: deque[tuple[str, int]] = deque(maxlen=KEPT)
        """The liar's own lives, and those that it has made up."""
        self.met: dict[str, deque[tuple[str, int]]] = {}
        """Made-up lives that shook hands with the lead at an address."""
        self.proofs: dict[tuple[str, tuple[str, int]], bytes] = {}
        """Proof that the lead at an address expects of each of these lives."""
        self.about = b""
        """The access that the liar currently speaks of; empty means any."""

    def is_honest(self, peer: Peer) -> bool:
        """Returns True if that life belongs to an honest engine."""
        return not self._world.lies(peer.key)

    def meets(self, address: str, life: tuple[str, int]) -> None:
        """Takes note that a made-up life was admitted at an address."""
        self.met.setdefault(address, deque(maxlen=4)).append(life)

    def sees(self, event: object) -> None:
        """Remembers things of a request that the liar sends or gets."""
        if isinstance(event, OpenAccess):
            for opening in event.openings:
                self.tokens.append(opening.token)
                self.texts.append(opening.transfer_id)
                self.openings.append(opening)
                if opening.push_content is not None:
                    self.contents.append(opening.push_content)
        elif isinstance(event, RegisterPush):
            self.tokens.append(event.token)
        elif isinstance(event, RenewLeases):
            self.tokens.extend(ref.token for ref in event.leases if ref.token)

    # -- values

    def often(self, odds: float) -> bool:
        return self.rng.random() < odds

    def number(self, near: int) -> int:
        """Returns a uint32: one near `near`, or any."""
        close = min(max(near + self.rng.choice((-1, 1, 2)), 0), UINT32)
        return self.rng.choice((close, close, self.rng.choice(NUMBERS)))

    def seconds(self) -> float:
        return self.rng.choice(SECONDS)

    def text(self) -> str:
        return self.rng.choice(self.texts)

    def name(self) -> str:
        """Returns an id of a transfer, a lease or a target, of any engine, as if it could be guessed."""
        names = self._world.names
        return self.rng.choice(names) if names and self.rng.randrange(2) else self.text()

    def access_id(self) -> bytes:
        """Returns an access id, mostly another peer's, as if it could be guessed."""
        rng, seen = self.rng, self._world.access_ids
        if self.about:
            return self.about
        if seen and rng.randrange(4):
            return rng.choice(seen)
        return rng.choice((rng.randbytes(ACCESS_ID_BYTES), b"", b"\0", rng.randbytes(100)))

    def token(self) -> bytes:
        """Returns a grant: held, damaged, forged, or none at all."""
        if not self.tokens or not self.rng.randrange(8):
            return self.rng.choice((b"", self.rng.randbytes(40)))
        token = self.rng.choice(self.tokens)
        if not self.rng.randrange(FORGED):
            return self._forged(token)
        if token and not self.rng.randrange(4):
            at = self.rng.randrange(len(token))
            return token[:at] + bytes([token[at] ^ 1 << self.rng.randrange(8)]) + token[at + 1 :]
        return token

    def _forged(self, token: bytes) -> bytes:
        """Returns a grant like that one, for any lease or target, signed with a key of the liar's own."""
        claims = claims_of(token)
        if claims is None:
            return b""
        access, name = self.rng.choice(tuple(AccessKind)), self.name()[:NAME_CHARS] or "l-0"
        return mint(replace(claims, access=access, lease_id=name), signing_key(self.rng.randbytes(32)))

    def lease(self) -> LeaseRef:
        return LeaseRef(token=self.token()) if self.rng.randrange(4) else LeaseRef(self.name() or "l-0")

    def life(self) -> tuple[str, int]:
        """Returns one of the liar's own or made-up lives, or makes one up. `StolenNames` uses the lives of others."""
        if self.lives and self.rng.randrange(4):
            return self.rng.choice(self.lives)
        return self.make_up()

    def make_up(self, name: str = "") -> tuple[str, int]:
        """Makes up a life of an engine that does not exist: with the name `name`, or mostly the liar's own name, or an
        unused one. Calls to the life may go anywhere.
        """
        names = (self._address, self._address, NO_ENGINE, self.rng.choice(self._world.network.addresses))
        made = name or self.rng.choice(names), self.rng.getrandbits(63) | 1
        self.lives.append(made)
        where = self.rng.choice((self._address, self._address, *self._world.network.addresses, "nowhere"))
        self._world.network.personas[peer_key(*made)] = Persona(self._address, where)
        return made

    def content(self, like: ContentId | None) -> ContentId | None:
        """Returns the content of another prompt, a damaged one, or none."""
        rng = self.rng
        if like is not None and like.digests and rng.randrange(2):
            at = rng.randrange(len(like.digests))
            damaged = like.digests[:at] + bytes([like.digests[at] ^ 1]) + like.digests[at + 1 :]
            return ContentId(like.tokens, damaged)
        if not self.contents or not rng.randrange(4):
            return rng.choice((None, ContentId(rng.choice((1, 16, 100)), opaque=b"lie")))
        return rng.choice(self.contents)

    def error(self) -> KVGrpcError:
        """Returns any refusal."""
        return self.rng.choice(ERRORS)(self.rng.choice(REASONS), "a lie")

    # -- blocks

    def ids(self, ids: Ids, blocks: int) -> Ids:
        """Returns other blocks than these, for a pool with `blocks` blocks."""
        rng, found = self.rng, ids.tolist()
        kind = rng.randrange(6)
        if kind == 0:
            found = rng.sample(range(max(blocks, len(found))), len(found))
        elif kind == 1:
            found = found[:-1]
        elif kind == 2:
            found.append(rng.randrange(max(blocks, 1)))
        elif kind == 3:
            found = found[:1] * len(found)
        elif kind == 4 and found:
            found[rng.randrange(len(found))] = rng.choice((blocks, UINT32))
        else:
            found.reverse()
        return np.array(found, dtype=np.int64)

    def lists(self, lists: BlockLists) -> BlockLists:
        """Returns other lists of blocks."""
        rng, rows, groups = self.rng, list(lists), self._world.pool.groups
        if self._world.pool.shared_spaces and len(rows) > 1 and rng.random() < SHARED:
            (group, ids), (_, others) = rng.sample(rows, 2)  # blocks of one group that another group of its space has
            ids = np.concatenate((others, ids))[: len(ids)]
            return tuple((i, ids if i == group else listed) for i, listed in rows)
        kind = rng.randrange(8)
        if not rows or kind == 0:
            return (*rows, (rng.choice((0, 1, 2, UINT32)), np.arange(rng.randrange(3), dtype=np.int64)))
        at = rng.randrange(len(rows))
        group, ids = rows[at]
        if kind == 1:
            del rows[at]
        elif kind == 2:
            rows[at] = rng.choice((0, 1, 2, UINT32)), ids
        elif kind == 3:
            rows.reverse()
        else:
            rows[at] = group, self.ids(ids, groups[group].blocks if group < len(groups) else 1)
        return tuple(rows)

    def layers(self) -> LayerRange | None:
        return self.rng.choice((None, (0, 1), (1, 1), (0, 2), (1, 2), (2, 1), (UINT32, 1), (0, UINT32)))

    def parts(self, parts: tuple[ReadyPart, ...]) -> tuple[ReadyPart, ...]:
        """Returns other parts: with other numbers, blocks or layers; more, fewer, or in another order."""
        rng, rows = self.rng, list(parts)
        kind = rng.randrange(8)
        if not rows or kind == 0:
            new = ReadyPart(len(rows), self.lists(()), self._known(()), self.layers(), rng.random() < 0.5)
            return (*rows, new)
        at = rng.randrange(len(rows))
        row = rows[at]
        if kind == 1:
            del rows[at]
        elif kind == 2:
            rows.append(row)
        elif kind == 3:
            rows.reverse()
        else:
            changes: dict[str, Callable[[], object]] = {
                "number": lambda: self.number(row.number),
                "blocks": lambda: self.lists(row.blocks),
                "known": lambda: self._known(row.known),
                "layers": self.layers,
                "last": lambda: not row.last,
            }
            name = rng.choice((*changes, "blocks", "blocks"))
            rows[at] = replace(row, **{name: changes[name]()})  # type: ignore[arg-type]
        return tuple(rows)

    def _known(self, known: tuple[int, ...]) -> tuple[int, ...]:
        """Returns other counts of blocks that earlier parts list."""
        return self.rng.choice(((), *[(*known, self.number(0))] * 2, tuple(map(self.number, known))))

    # -- sends

    @property
    def sends(self) -> bool:
        """True if ranks send in this world."""
        return bool(self._world.collective)

    def ask(self, like: SendAsk | None) -> SendAsk:
        """Returns a request for other bytes, another number or epoch, or between other ranks."""
        rng = self.rng
        like = like or SendAsk(0, 0, rng.choice((1, 1, 2, 3)), rng.choice((MEET, 1, 1, 2, 3)), *self._runs(1))
        changes: dict[str, Callable[[], object]] = {
            "source_rank": lambda: rng.choice((0, 1, 2, UINT32)),
            "rank": lambda: rng.choice((0, 1, 2, UINT32)),
            "epoch": lambda: self.number(like.epoch),
            "sequence": lambda: self.number(like.sequence),
            "values": lambda: rng.choice(((), (("wire", b"wire-1"),), (("", b"x" * 4_096),) * 4)),
        }
        name = rng.choice((*changes, *["runs"] * 4))
        if name != "runs":
            return replace(like, **{name: changes[name]()})  # type: ignore[arg-type]
        offsets, nbytes = self._runs(max(len(like.offsets), 1))
        return replace(like, offsets=offsets, nbytes=nbytes)

    def _runs(self, count: int) -> tuple[Ids, Ids]:
        """Returns runs near the begin of some memory, or anywhere."""
        rng, total = self.rng, self._world.pool.total_bytes
        near = [(rng.randrange(total), rng.choice((1, 1, 2, total))) for _ in range(count)]
        rows = near if rng.randrange(4) else [(rng.choice((0, BYTES_MAX)), rng.choice((0, 1, BYTES_MAX)))] * count
        offsets, nbytes = np.array(rows, dtype=np.int64).T
        return offsets, nbytes

    # -- engines

    def description(self, me: EngineDescription) -> EngineDescription:
        """Returns a description of another engine than the liar's."""
        rng = self.rng
        kind = rng.randrange(8)
        if kind < 3:
            engine_id, incarnation = self.make_up()
            return replace(me, engine_id=engine_id, incarnation=incarnation)
        if kind == 3:
            return replace(me, world_size=rng.choice((1, 2, 3, 4096)))
        if kind == 4:
            return replace(me, memory_generation=self.number(me.memory_generation))
        if kind == 5:
            features = rng.choice(((), ("reads_pushes",), ("checksums",), ("x",)))
            return replace(me, features=features, required_features=rng.choice(((), features, ("checksums",))))
        if kind == 6:
            return rng.choice((
                replace(me, address=rng.choice((*self._world.network.addresses, "", "nowhere"))),
                replace(me, protocol_min=9, protocol_max=9),
                replace(me, weights_revision=rng.choice(("", "other"))),
            ))  # fmt: skip
        return replace(me, pool=self.pool(me.pool))

    def pool(self, pool: PoolLayout) -> PoolLayout:
        """Returns another layout, which is valid by itself."""
        rng, groups, regions = self.rng, list(pool.groups), list(pool.regions)
        kind, total_bytes = rng.randrange(6), 1 << 56
        if kind == 0:
            blocks = rng.choice((1, 2, 1_000, UINT32))
            groups = [replace(group, blocks=blocks) for group in groups]
            size = min(blocks, 1 << 32)
            regions = [replace(region, offset=i * size) for i, region in enumerate(regions)]
        elif kind == 1:
            groups = [replace(group, blocks=1) for group in groups]
            stride = rng.choice((1 << 55, (1 << 63) - 1, 1 << 63, UINT64))
            regions = [replace(region, offset=i, stride_bytes=stride) for i, region in enumerate(regions)]
        elif kind == 2:
            regions = [replace(region, offset=region.offset + rng.choice((1, 1 << 40, 1 << 62))) for region in regions]
        elif kind == 3:
            regions.reverse()
        elif kind == 4:
            groups[0] = rng.choice((replace(groups[0], block_tokens=3), replace(groups[0], kv_heads=3)))
        else:
            groups, regions = groups[:1], [region for region in regions if region.group == 0]
        try:
            return PoolLayout(tuple(groups), tuple(regions), total_bytes)
        except InvalidRequest:
            return pool

    def endpoints(self, endpoints: tuple[RankEndpoint, ...]) -> tuple[RankEndpoint, ...]:
        """Returns other endpoints: too few, too many, of other ranks, or leading nowhere. Ranks themselves must detect
        whose memory an endpoint leads to (`kvgrpc/datapath`).
        """
        rng, rows = self.rng, list(endpoints)
        kind = rng.randrange(5)
        if not rows or kind == 0:
            return ()
        at = rng.randrange(len(rows))
        if kind == 1:
            rows.append(rows[at])
        elif kind == 2:
            rows[at] = replace(rows[at], rank=rng.choice((0, 1, 2, UINT32)))
        elif kind == 3:
            rows[at] = RankEndpoint(rows[at].rank)
        else:
            loopback = rows[at].loopback
            rows[at] = replace(rows[at], loopback=None if loopback is None else replace(loopback, key="nowhere"))
        return tuple(rows)
