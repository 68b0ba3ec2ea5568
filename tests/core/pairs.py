"""Leads that talk to each other: a source `p` and destinations `d` and `e`, each with its own node.

Calls between leads are carried over and answered at once, until none is left. Postings wait for `moved`. Actions of the
kinds in `deaf` get lost on the way. `tick` advances the clocks of all leads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvgrpc.core import actions, events
from kvgrpc.core.actions import Action
from kvgrpc.core.events import Call
from kvgrpc.core.node import Node
from kvgrpc.core.tables.transfers import Transfer
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import KVGrpcError, Reason, Unavailable
from tests.core.nodes import KEY, Lead, access_id, content, describe, key_of, lists

Writers = frozenset[str]
"""Data paths over which a source may write."""
READING: Writers = frozenset()
WRITING = frozenset({"loopback"})
MODES = pytest.mark.parametrize("writers", [READING, WRITING], ids=["destination moves", "source moves"])


class Pair:
    """A source and two destinations; `writers` are the data paths over which a source writes."""

    def __init__(self, writers: Writers = READING, p: EngineDescription | None = None, **limits: Any) -> None:
        self.p = self._lead(p or describe("p", 1), writers, **limits)
        self.d = self._lead(describe("d", 2, **self._alike), writers, **limits)
        self.e = self._lead(describe("e", 3, **self._alike), writers, **limits)
        """A second destination."""
        self.leads = [self.p, self.d, self.e]
        self.posts: list[tuple[Lead, actions.Post]] = []
        self.deaf: set[type[Action]] = set()
        self.lost: list[tuple[Lead, Action]] = []
        self.told: dict[str, list[Any]] = {"p": [], "d": [], "e": []}
        self.sent: list[Action] = []
        self._todo: deque[tuple[Lead, Action]] = deque()
        self._unanswered: list[tuple[Lead, Lead, int, Callable[[Any], events.Event]]] = []
        self._registered = 30
        """Number of the next access id for a registration by a destination's lead; each registration takes two."""
        self.meet()

    @property
    def _alike(self) -> dict[str, Any]:
        """Fields of a description that make an engine compatible with the source."""
        return {"pool": self.p.me.pool, "world_size": self.p.me.world_size}

    def meet(self) -> None:
        """Connects the destinations with the source, both ways."""
        meetings = [(self.p, self.d), (self.d, self.p), (self.p, self.e), (self.e, self.p)]
        for here, there in meetings:
            here.admit(there.me)
        for here, there in meetings:
            here.node.state.peers.lives[key_of(there.me)].dialled = there.me.address

    def replace_destination(self, writers: Writers = READING) -> None:
        """Puts another engine, `f`, in the place of the first destination."""
        self.d = self._lead(describe("f", 4, **self._alike), writers)
        self.leads.append(self.d)
        self.told["f"] = []
        self.meet()

    def feed(self, lead: Lead, event: events.Event, after_s: float = 0.0) -> None:
        """Feeds an event, and carries over all that follows at every lead."""
        self._take(lead, lead.feed(event, after_s))
        self.run()

    def tick(self, after_s: float) -> None:
        for lead in self.leads:
            self._take(lead, lead.feed(events.Tick(), after_s))
        self.run()

    def call(self, lead: Lead, make: Callable[[Call], events.Event], principal: str = "engine", **fields: Any) -> Any:
        """Makes a call, carries over all that follows, and returns the answer."""
        number = lead.ask(make, principal, **fields)
        self._take(lead, lead.done)
        self.run()
        return lead.answer(number)

    def run(self) -> None:
        """Carries over pending actions and answers until none is left."""
        while self._todo or self._answered():
            if not self._todo:
                continue
            lead, action = self._todo.popleft()
            if isinstance(action, actions.Post):
                self.posts.append((lead, action))
            elif isinstance(action, actions.TellEngine):
                self.told[lead.me.engine_id].append(action.news)
            elif type(action) in self.deaf:
                self.lost.append((lead, action))
            else:
                self.sent.append(action)
                self._carry(lead, action)

    def recover(self) -> None:
        """Delivers the actions that got lost."""
        self.deaf.clear()
        for lead, action in self.lost:
            self._todo.append((lead, action))
        self.lost.clear()
        self.run()

    def moved(self, count: int | None = None, **fields: Any) -> None:
        """Ends the oldest `count` postings, all by default."""
        posts, self.posts = self.posts[:count], self.posts[count:] if count is not None else []
        for lead, post in posts:
            made = {"done": True, "nbytes": post.runs.total_bytes} | fields
            self.feed(lead, events.PostingEnded(post.posting_id, **made))

    # -- the calls of a push

    def reserve(
        self, tokens: int = 32, *blocks: Sequence[int], key: bytes = KEY, at: Lead | None = None, **fields: Any
    ) -> Any:
        fields.setdefault("content", content(tokens))
        where = blocks or [range(g.blocks_of(tokens)) for g in self.d.me.pool.groups]
        return self.call(at or self.d, lambda c: events.ReserveBlocks(c, key, lists(*where), **fields))

    def register(self, token: bytes, principal: str = "router", number: int = 10, call: Any = None) -> Any:
        return self.call(
            self.p,
            lambda c: events.RegisterPush(
                c, token, "r", access_id=access_id(number), reverse_access_id=access_id(number + 1)
            ),
            principal,
            **(call or {}),
        )

    def finish(self, tokens: int = 32, *blocks: Sequence[int], call: Any = None, **fields: Any) -> Any:
        fields.setdefault("key", KEY)
        fields.setdefault("content", content(tokens))
        fields.setdefault("waits_for", events.WaitsFor.REGISTRATION)
        where = blocks or [range(g.blocks_of(tokens)) for g in self.p.me.pool.groups]
        fields.setdefault("blocks", lists(*where))
        return self.call(self.p, lambda c: events.FinishedBlocks(c, **fields), **(call or {}))

    def both(self) -> tuple[Transfer, Transfer]:
        """Returns the newest transfers of source and destination."""
        return next(iter(self.p.state.transfers)), next(iter(self.d.state.transfers))

    def reasons(self) -> list[Reason | None]:
        """Returns the reasons why the newest transfers of source and destination failed."""
        return [transfer.failure.reason if transfer.failure else None for transfer in self.both()]

    # -- the wire

    def _lead(self, me: EngineDescription, writers: Writers, **limits: Any) -> Lead:
        lead = Lead(me)
        lead.node = Node(Limits(**limits), writers)
        lead.begin(me)
        return lead

    def _take(self, lead: Lead, done: list[Action]) -> None:
        self._todo.extend((lead, action) for action in done)

    def _carry(self, lead: Lead, action: Action) -> None:
        me = lead.me
        who = me.engine_id, me.incarnation
        match action:
            case actions.SendOpen(opening=opening):
                self._rpc(
                    lead,
                    action.peer,
                    lambda c: events.OpenAccess(c, *who, (opening,)),
                    lambda a: events.AccessAnswered(opening.access_id, _first(a)),
                )
            case actions.SendSettle(settling=settling):
                self._rpc(
                    lead,
                    action.peer,
                    lambda c: events.SettleAccess(c, *who, (settling,)),
                    lambda a: events.SettleAnswered(settling.access_id, _first(a)),
                )
            case actions.SendClose(closing=closing, incarnation=incarnation):
                self._rpc(
                    lead,
                    action.peer,
                    lambda c: events.CloseAccess(c, me.engine_id, incarnation, (closing,)),
                    lambda a: events.CloseAnswered(closing.access_id, answered=_knows(a), quiesced=closing.quiesced),
                )
            case actions.SendParts(access_id=write_access, parts=parts):
                self._rpc(
                    lead,
                    action.peer,
                    lambda c: events.PartsReady(c, *who, write_access, parts),
                    lambda a: events.PartsAnswered(write_access, _error(a)),
                )
            case actions.SendRegister(transfer_id=transfer_id, token=token, request_id=request_id):
                access, reverse = access_id(self._registered), access_id(self._registered + 1)
                self._registered += 2
                self._rpc(
                    lead,
                    action.peer,
                    lambda c: events.RegisterPush(c, token, request_id, access, reverse),
                    lambda a: events.RegisterAnswered(transfer_id, action.peer, _error(a)),
                )
            case actions.SendRenewKeys(keys=keys, ttl_s=ttl_s):
                refs = tuple(events.LeaseRef(key=key) for key in keys)
                self._rpc(
                    lead,
                    action.peer,
                    lambda c: events.RenewLeases(c, refs, ttl_s),
                    lambda a: events.KeysRenewed(action.peer, _left(keys, a)),
                )

    def _rpc(
        self, lead: Lead, peer: str, make: Callable[[Call], events.Event], answered: Callable[[Any], events.Event]
    ) -> None:
        (there,) = [other for other in self.leads if key_of(other.me) == peer]
        number = there.ask(make, principal="peer")
        self._take(there, there.done)
        self._unanswered.append((lead, there, number, answered))
        self._answered()

    def _answered(self) -> bool:
        """Carries answers back; returns whether there was one."""
        waiting, self._unanswered = self._unanswered, []
        found = False
        for lead, there, number, answered in waiting:
            try:
                answer = there.answer(number)
            except KVGrpcError as error:
                answer = error
            if answer is None:
                self._unanswered.append((lead, there, number, answered))
            else:
                found = True
                self._take(lead, lead.feed(answered(answer)))
        return found


def _first(answer: Any) -> Any:
    return answer if isinstance(answer, KVGrpcError) else answer.rows[0]


def _left(keys: tuple[bytes, ...], answer: Any) -> tuple[tuple[bytes, float], ...]:
    if isinstance(answer, KVGrpcError):
        return ()
    return tuple((key, left_s) for key, (left_s, reason, _) in zip(keys, answer.rows, strict=True) if reason is None)


def _error(answer: Any) -> KVGrpcError | None:
    return answer if isinstance(answer, KVGrpcError) else None


def _knows(answer: Any) -> bool:
    return not isinstance(answer, KVGrpcError) or answer.reason is Reason.NO_HANDSHAKE


UNREACHABLE = Unavailable(Reason.PEER_UNREACHABLE, "no answer")
