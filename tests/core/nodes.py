"""A node under test: `Lead` feeds it events at times that the test chooses, and keeps the actions that it returns.

The test plays the peers: `admit` and `connect` do a whole handshake, and tests write out the other messages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.actions import Action
from kvgrpc.core.events import Call, CloseOutcome, Destination, Event
from kvgrpc.core.node import Node
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.tables.timers import Timers
from kvgrpc.core.tables.transfers import Transfer
from kvgrpc.core.values.block_ids import BlockLists
from kvgrpc.core.values.bridge import Bridges
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.content import ContentClaim, ContentId, chain
from kvgrpc.core.values.endpoints import LoopbackEndpoint, RankEndpoint
from kvgrpc.core.values.grants import AccessKind, Claims, OnAbort, mint, signing_key
from kvgrpc.core.values.ids import peer_key
from kvgrpc.core.values.layout import WHOLE, Group, GroupKind, PoolKind, PoolLayout, Region, uniform_layout
from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.owners import ENGINE
from kvgrpc.errors import KVGrpcError, Reason
from tests.core.shown import showing

_A = TypeVar("_A")
KEY = b"key of a request"
SECRET = b"secret of a session, 32 bytes..."
BLOCK_TOKENS = 16


def full(blocks: int = 64, layers: int = 2) -> PoolLayout:
    """Makes a layout of one full-attention group: 16 tokens a block, 8 bytes a block and layer."""
    return uniform_layout(Group("full", GroupKind.FULL_ATTENTION, layers, 16, blocks, 1, 1, "uint8"), 8)


def hybrid(kind: GroupKind = GroupKind.FULL_ATTENTION, blocks: int = 64) -> PoolLayout:
    """Makes a layout of two groups: `fine` with 16 tokens a block, and `other`, of kind `kind`, with 32."""
    groups = (
        Group("fine", GroupKind.FULL_ATTENTION, 1, 16, blocks, 1, 1, "uint8"),
        Group("other", kind, 1, 32, blocks, 1, 1, "uint8"),
    )
    regions = (Region(0, 0, 1, 0, 8, 8), Region(1, 0, 1, 8 * blocks, 8, 8, WHOLE[kind]))
    return PoolLayout(groups, regions, 16 * blocks)


def aliased(blocks: int = 16, window: int = 32) -> PoolLayout:
    """Makes a layout of a full and a sliding-window group, each of two layers, on the same bytes in one block space."""
    groups = (
        Group("full", GroupKind.FULL_ATTENTION, 2, 16, blocks, 1, 1, "uint8", space="kv"),
        Group("window", GroupKind.SLIDING_WINDOW, 2, 16, blocks, 1, 1, "uint8", window_tokens=window, space="kv"),
    )
    regions = tuple(Region(i, layer, 1, 8 * blocks * layer, 8, 8) for i in range(2) for layer in range(2))
    return PoolLayout(groups, regions, 16 * blocks)


def describe(engine_id: str = "p", incarnation: int = 1, **changes: Any) -> EngineDescription:
    """Makes an engine description; `changes` replace its fields."""
    made = EngineDescription(
        engine_id=engine_id,
        incarnation=incarnation,
        address=f"{engine_id}:1",
        protocol_min=1,
        protocol_max=1,
        weights_revision="w",
        pool=full(),
        pool_kind=PoolKind.ENGINE_MANAGED,
        world_size=1,
    )
    return dataclasses.replace(made, **changes)


def key_of(description: EngineDescription) -> str:
    return peer_key(description.engine_id, description.incarnation)


def endpoint(rank: int = 0, key: str = "m") -> RankEndpoint:
    return RankEndpoint(rank, loopback=LoopbackEndpoint(key, 1024))


def endpoints(description: EngineDescription, key: str = "m") -> tuple[RankEndpoint, ...]:
    return tuple(endpoint(rank, key) for rank in range(description.world_size))


def ids(*blocks: int) -> Any:
    return np.array(blocks, dtype=np.int64)


def crcs(*values: int) -> bytes:
    return np.array(values, dtype="<u4").tobytes()


def lists(*groups: Sequence[int]) -> BlockLists:
    """Makes block lists, one for each group."""
    return tuple((i, ids(*blocks)) for i, blocks in enumerate(groups))


def content(tokens: int, first: int = 0) -> ContentId:
    """Returns the content of `tokens` token ids that count up from `first`."""
    return chain(range(first, first + tokens), weights_revision="w")


def claim(tokens: int, first: int = 0) -> ContentClaim:
    return ContentClaim(tokens, content(tokens, first).digest(tokens))


def access_id(number: int = 1) -> bytes:
    return number.to_bytes(16, "big")


def grant(
    source: EngineDescription, *, tokens: int = 32, key: bytes = KEY, on_abort: OnAbort = OnAbort.RELEASE,
    access: AccessKind = AccessKind.READ, lease_id: str = "l-1", secret: bytes = SECRET, request_time_us: int = 0,
    tenant: str = "",
) -> bytes:  # fmt: skip
    """Mints a grant of a source that the test plays."""
    named, blocks = (source.engine_id, source.incarnation, source.address, lease_id, key), -(-tokens // 16)
    claims = Claims(access, *named, 30.0, blocks, tokens, on_abort, tenant, request_time_us)
    return mint(claims, signing_key(secret))


@contextlib.contextmanager
def refused(reason: Reason, kind: type[KVGrpcError] = KVGrpcError) -> Iterator[None]:
    """Expects an error with that reason."""
    with pytest.raises(kind) as caught:
        yield
    assert caught.value.reason is reason, caught.value


class Lead:
    """One node, its clock and its calls."""

    checked = True
    """Enables a check of the node's invariants after every event."""
    data_path = "loopback"
    """The data path by which its ranks reach the ranks of peers."""

    def __init__(self, description: EngineDescription | None = None, limits: Limits | None = None) -> None:
        self.node = Node(limits)
        self.now = 100.0
        self.done: list[Action] = []
        """Actions that the last event led to."""
        self._calls = itertools.count(1)
        self._answers: dict[int, actions.Answer | KVGrpcError] = {}
        self.begin(description or describe())

    @property
    def state(self) -> Any:
        return self.node.state

    @property
    def me(self) -> EngineDescription:
        found = self.node.state.life.description
        assert found is not None
        return found

    def begin(self, description: EngineDescription | None, *, attached: bool = True) -> list[Action]:
        incarnation = description.incarnation if description else self.node.state.life.incarnation + 1
        return self.feed(events.LifeBegan(incarnation, SECRET, description, attached))

    def feed(self, event: Event, after_s: float = 0.0) -> list[Action]:
        """Feeds an event `after_s` seconds after the last one, and returns its actions."""
        self.now += after_s
        self.done = self.node.handle(showing(event, self.node), self.now)
        if self.checked:
            self.node.check()
        for action in self.done:
            if isinstance(action, actions.Reply | actions.Refuse):
                assert action.call_id not in self._answers, "a call is answered twice"
                self._answers[action.call_id] = action.answer if isinstance(action, actions.Reply) else action.error
        return self.done

    def tick(self, after_s: float) -> list[Action]:
        """Lets time pass, and returns the actions that follow."""
        return self.feed(events.Tick(), after_s)

    def ask(self, make: Callable[[Call], Event], principal: str = ENGINE, **call: Any) -> int:
        """Makes a call, and returns its number for `answer`."""
        number = next(self._calls)
        self.feed(make(Call(number, principal, **call)))
        return number

    def answer(self, call: int) -> Any:
        """Returns the answer to a call, None while there is none; raises the error of a refused call."""
        answer = self._answers.get(call)
        if isinstance(answer, KVGrpcError):
            raise answer
        return answer

    def call(self, make: Callable[[Call], Event], principal: str = ENGINE, **call: Any) -> Any:
        """Makes a call that is answered at once, and returns the answer."""
        number = self.ask(make, principal, **call)
        assert number in self._answers, "the call was not answered"
        return self.answer(number)

    def seen(self, kind: type[_A]) -> list[_A]:
        """Returns the last actions of that kind."""
        return [action for action in self.done if isinstance(action, kind)]

    def one(self, kind: type[_A]) -> _A:
        """Returns the one action of that kind among the last ones."""
        (found,) = self.seen(kind)
        return found

    def news(self) -> list[Any]:
        """Returns the news for the engine among the last actions."""
        return [action.news for action in self.seen(actions.TellEngine)]

    def transfer(self, transfer_id: str) -> Transfer:
        found: Transfer = self.node.state.transfers.get(transfer_id)
        return found

    # -- as a source

    def finish(
        self, tokens: int = 32, *blocks: Sequence[int], principal: str = ENGINE, call: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Any:  # fmt: skip
        """Calls FinishedBlocks for the first blocks or for `blocks`; `fields` are of the event, `call` of its call."""
        fields.setdefault("key", KEY)
        fields.setdefault("content", content(tokens))
        if "blocks" not in fields:
            where = blocks or [range(group.blocks_of(tokens)) for group in self.me.pool.groups]
            fields["blocks"] = lists(*where)
        return self.call(lambda c: events.FinishedBlocks(c, **fields), principal, **(call or {}))

    def admit(self, peer: EngineDescription) -> str:
        """Lets a peer shake hands with this lead, and returns the peer's key."""
        self.silence_former(peer)
        call = self.ask(lambda c: events.HandshakeReceived(c, peer, endpoints(peer)), principal="peer")
        self._offer()
        assert isinstance(self.answer(call), actions.Introduced)
        self.map(peer)
        self.feed(events.PeerAlive(key_of(peer)))
        return key_of(peer)

    def silence_former(self, peer: EngineDescription) -> None:
        """Ends the liveness streams of other lives of the peer's engine, as happens before a new life begins."""
        for other in list(self.state.peers.lives.values()):
            if other.description.engine_id == peer.engine_id and other.key != key_of(peer):
                self.feed(events.PeerSilent(other.key))

    def open(self, peer: EngineDescription, *openings: AccessOpening) -> int:
        """Calls OpenAccess as a peer, and returns the call's number."""
        return self.ask(
            lambda c: events.OpenAccess(c, peer.engine_id, peer.incarnation, openings), principal=peer.engine_id
        )

    def opened(self, peer: EngineDescription, *openings: AccessOpening) -> tuple[Any, ...]:
        """Calls OpenAccess as a peer, expects an answer at once, and returns its rows."""
        answer = self.answer(self.open(peer, *openings))
        assert isinstance(answer, actions.Openings)
        return answer.rows

    def settle(self, peer: EngineDescription, number: int = 1, *, last: bool = True, nbytes: int = 0) -> Any:
        """Settles an access as a peer, and returns the verdict."""
        row = events.AccessSettling(access_id(number), last, nbytes)
        answer = self.call(
            lambda c: events.SettleAccess(c, peer.engine_id, peer.incarnation, (row,)), principal=peer.engine_id
        )
        return answer.rows[0]

    def close(
        self,
        peer: EngineDescription,
        number: int = 1,
        *,
        outcome: CloseOutcome = CloseOutcome.FAILED,
        token: bytes = b"",
    ) -> bool:
        """Closes an access as a peer, and returns whether the access was open."""
        row = events.AccessClosing(access_id(number), outcome, quiesced=True, token=token)
        answer = self.call(
            lambda c: events.CloseAccess(c, peer.engine_id, peer.incarnation, (row,)), principal=peer.engine_id
        )
        found: bool = answer.rows[0]
        return found

    # -- as a destination

    def pull(
        self, token: bytes, tokens: int = 32, *blocks: Sequence[int], number: int = 1, have_tokens: int = 0,
        principal: str = ENGINE, **fields: Any,
    ) -> Transfer:  # fmt: skip
        """Calls PullBlocks into `blocks`; without them the pull waits for its destination."""
        fields.setdefault("content", content(tokens))
        if blocks:
            fields["destination"] = Destination(lists(*blocks), have_tokens)
        answer = self.call(lambda c: events.PullBlocks(c, token, access_id=access_id(number), **fields), principal)
        transfer: Transfer = answer.transfer
        return transfer

    def give(self, transfer_id: str, *blocks: Sequence[int], have_tokens: int = 0, **fields: Any) -> Transfer:
        """Gives a waiting pull its destination, by transfer id."""
        destination = Destination(lists(*blocks), have_tokens)
        answer = self.call(lambda c: events.GiveDestination(c, transfer_id, destination, **fields))
        transfer: Transfer = answer.transfer
        return transfer

    def connect(self, peer: EngineDescription) -> list[Action]:
        """Answers this lead's dial to a peer, and returns the actions of the last report."""
        self._offer()
        self.feed(events.PeerAnswered(peer.address, peer, endpoints(peer)))
        return self.map(peer)

    def map(self, peer: EngineDescription, data_path: str | None = None) -> list[Action]:
        """Answers pending `MapPeer` actions: the ranks reached the peer, or did not if `data_path` is empty."""
        data_path, done = self.data_path if data_path is None else data_path, self.done
        for action in self.seen(actions.MapPeer):
            rejected = () if data_path else (("shm", "it is on another host"),)
            done = self.feed(
                events.PeerMapped(
                    action.rank, action.peer, data_path, "why", rejected, action.attempt, action.endpoint.rank
                )
            )
        return done

    def _offer(self) -> None:
        maps = self.seen(actions.MapPeer)
        for action in self.seen(actions.MakeOffer):
            self.feed(events.EndpointOffered(action.rank, action.key, endpoint(action.rank)))
        self.done = [*maps, *self.done]


def answer_of(source: EngineDescription, tokens: int = 32, *blocks: Sequence[int], **changes: Any) -> events.Opened:
    """Makes the answer to OpenAccess of a source that the test plays."""
    where = lists(*blocks) if blocks else lists(*(range(g.blocks_of(tokens)) for g in source.pool.groups))
    made = events.Opened(where, tokens, tokens, 30.0, 30.0, source.memory_generation, "t-source", "l-1")
    return dataclasses.replace(made, **changes)


def snapshot(value: Any, seen: dict[int, int] | None = None) -> Any:  # noqa: C901, PLR0911 - one return for each kind
    """Returns all that an object refers to, as plain values that compare by equality."""
    seen = {} if seen is None else seen
    if value is None or isinstance(value, bool | int | float | str | bytes | enum.Enum | type):
        return value
    if id(value) in seen:
        return ("seen", seen[id(value)])
    if isinstance(value, Timers):
        value.next_deadline()  # drops stale entries at the top of the heap
    if isinstance(value, Bridges):
        return "as it was made"  # earlier plans are a cache, not state
    if callable(value):
        return getattr(value, "__qualname__", repr(type(value)))
    seen[id(value)] = len(seen)
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tolist())
    if isinstance(value, dict):
        return [(snapshot(k, seen), snapshot(v, seen)) for k, v in value.items()]
    if isinstance(value, list | tuple | deque):
        return [snapshot(item, seen) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(snapshot(item, seen)) for item in value)
    if isinstance(value, itertools.count):
        return repr(value)
    made = vars(type(value))
    kept = [(name, held) for name, held in vars(value).items() if not isinstance(made.get(name), cached_property)]
    return (type(value).__name__, [(name, snapshot(held, seen)) for name, held in kept])


def check_table(table: dict[Any, frozenset[Any]], move: Callable[[Any, Any], Any]) -> None:
    """Checks a table of state transitions: allowed ones happen, others are refused and change nothing.

    `move(before, after)` makes an object in state `before`, moves it, and returns the state that it is in then.
    """
    states = list(next(iter(table)).__class__)
    assert set(table) == set(states), "the table has a row for each state"
    for before, after in itertools.product(states, states):
        if after in table[before]:
            assert move(before, after) is after
        elif after is not before:
            with pytest.raises(AssertionError):
                move(before, after)
