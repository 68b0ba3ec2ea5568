"""The shell round the node: one mailbox, one timer, the only reader of the clock.

Every event enters through `feed`; every action of the node leaves through the ports. Nothing here decides. Actions are
performed after the node returned and before the next event: a port that has news at once feeds it, and the news waits
its turn. The engine's void flags are read before each event, so that the node never vouches for blocks already taken
back.

A node that raises, or whose action a port fails to perform, is replaced. Its decided actions are performed; then its
life is over (`kvgrpc.core.defects`): waiting callers are refused, watchers of a transfer hear its end, and `on_defect`
is told, which begins the next life.
"""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from functools import partial
from itertools import count
from math import inf
from typing import Protocol, get_args

from kvgrpc.core import actions
from kvgrpc.core.actions import Action, AnswerSend, AwaitEnd, Expect, RankAction, Reply, UnmapPeer
from kvgrpc.core.defects import MESSAGE
from kvgrpc.core.events import CallAbandoned, Event, LeasesVoided, Tick
from kvgrpc.core.node import Node
from kvgrpc.core.tables.transfers import State, Transfer
from kvgrpc.core.values.ids import INCARNATION_MAX
from kvgrpc.errors import InternalError, KVGrpcError, Reason, Unavailable, note


class Alarm:
    """Rings on the running loop, at or before the earliest time that was set. It may ring early: following every
    deadline would cost every event. The listener checks what is due and sets the alarm again. It rings outside any
    caller's context, because its deadlines belong to many callers.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None
        self.at = inf
        """Time at which it rings, on the loop's clock. Read-only outside."""

    def set(self, when: float | None) -> None:
        """Makes the alarm ring at the latest at `when` on the loop's clock; None: there is no deadline."""
        if when is None or when >= self.at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self.at = when
        self._timer = asyncio.get_running_loop().call_at(when, self._rings, context=Context())

    def clear(self) -> None:
        """Cancels the alarm until it is set again."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self.at = None, inf

    def _rings(self) -> None:
        self._timer, self.at = None, inf
        self._ring()


_log = logging.getLogger(__name__)

RETRY_DELAY_S = 1.0
"""Retry delay told to callers after a defect, in seconds: about when the next life has begun."""


class PeerPort(Protocol):
    """Calls to other leads."""

    def dial(self, action: actions.Dial) -> None: ...

    def hang_up(self, peer: str) -> None: ...

    def open_access(self, action: actions.SendOpen) -> None: ...

    def settle_access(self, action: actions.SendSettle) -> None: ...

    def close_access(self, action: actions.SendClose) -> None: ...

    def parts_ready(self, action: actions.SendParts) -> None: ...

    def register_push(self, action: actions.SendRegister) -> None: ...

    def renew_leases(self, action: actions.SendRenew) -> None: ...

    def renew_keys(self, action: actions.SendRenewKeys) -> None: ...

    def checksum_blocks(self, action: actions.SendChecksums) -> None: ...

    def post_send(self, action: actions.SendPostSend) -> None: ...


class RankPort(Protocol):
    """Commands to one rank, or to all ranks of this engine: in the lead's own process, or in workers of a session."""

    def perform(self, action: actions.RankAction) -> None:
        """Begins a command, and returns at once. The result is fed to the node as an event."""


class EnginePort(Protocol):
    """News for the attached engine."""

    def tell(self, news: actions.EngineNews) -> None: ...

    def voided(self) -> tuple[str, ...]: ...


class Runner:
    """Runs a node on the running event loop. `on_transfer` hears every change of a transfer, and `on_end` the
    change that ends it, and `on_trouble` an end without success. `on_life` hears that a new life has begun, after
    all changes of the old one. `on_defect` hears that a defect ended the old life; the new one has no engine yet.
    `on_events` hears that events were handled, whatever their result. `defects` counts defects. `unclosed`:
    closings at destinations for the pushes of the life that the last defect ended.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.on_transfer: list[Callable[[Transfer], None]] = []
        self.on_end: list[Callable[[Transfer], None]] = []
        self.on_trouble: list[Callable[[Transfer], None]] = []
        self.on_life: list[Callable[[], None]] = []
        self.on_events: list[Callable[[], None]] = []
        self.on_defect: list[Callable[[], None]] = []
        self.defects = 0
        self.unclosed: list[actions.SendClose] = []
        self._calls: dict[int, Callable[[Reply | KVGrpcError], None]] = {}
        self.next_call_id = count(1).__next__
        """Returns a fresh call id, for callers that make their event themselves."""
        self._mailbox: deque[Event] = deque()
        self._busy = False
        self._alarm = Alarm(self._tick)
        self._performers: dict[type, Callable[[Action], None]] = {}
        self._voided: Callable[[], tuple[str, ...]] = tuple

    def start(self, peers: PeerPort, ranks: RankPort, engine: EnginePort | None) -> None:
        """Connects the ports; None: no engine can attach. Call it once, on the loop that runs everything."""
        self._loop = asyncio.get_running_loop()
        self.time = self._loop.time
        """Returns the seconds on the node's clock."""
        table: dict[type, Callable[..., None]] = {
            Reply: self._reply,
            actions.Refuse: self._refuse,
            actions.Dial: peers.dial,
            actions.HangUp: lambda action: peers.hang_up(action.peer),
            actions.SendOpen: peers.open_access,
            actions.SendSettle: peers.settle_access,
            actions.SendClose: peers.close_access,
            actions.SendParts: peers.parts_ready,
            actions.SendRegister: peers.register_push,
            actions.SendRenew: peers.renew_leases,
            actions.SendRenewKeys: peers.renew_keys,
            actions.SendChecksums: peers.checksum_blocks,
            actions.SendPostSend: peers.post_send,
            **dict.fromkeys(get_args(actions.RankAction), ranks.perform),
            actions.TransferChanged: self._transfer_changed,
            actions.BlocksLacking: _tell_lacking,
            actions.WeightsUnknown: lambda action: _log.warning(
                "neither this engine nor peer %s states its weights: they are not compared",
                note(action.peer),
                extra={"peer": note(action.peer.rpartition("@")[0])},
            ),
        }
        if engine is not None:
            table[actions.TellEngine] = lambda action: engine.tell(action.news)
            self._voided = engine.voided
        self._performers.update(table)

    async def ask(self, call_id: int, event: Event) -> Reply:
        """Feeds an event whose call has this id. Returns the node's reply, or raises its refusal."""
        future: asyncio.Future[Reply | KVGrpcError] = self._loop.create_future()

        def answered(reply: Reply | KVGrpcError) -> None:
            if not future.done():
                future.set_result(reply)

        self.submit(call_id, event, answered)
        try:
            reply = await future
        finally:
            self.abandon(call_id)
        if isinstance(reply, KVGrpcError):
            raise copied(reply)
        return reply

    def submit(self, call_id: int, event: Event, answered: Callable[[Reply | KVGrpcError], None]) -> None:
        """Feeds an event whose call has this id. `answered` gets the node's reply, in order with all actions."""
        self._calls[call_id] = answered
        self.feed(event)

    def abandon(self, call_id: int) -> None:
        """Ends the caller's wait; without effect if the call is answered."""
        if self._calls.pop(call_id, None) is not None:
            self.feed(CallAbandoned(call_id))

    def feed(self, event: Event) -> None:
        """Feeds an event that happened now. Never raises for what the event says."""
        self._mailbox.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._mailbox:
                event, life = self._mailbox.popleft(), self.node.state.life.incarnation
                try:
                    if voided := self._voided():
                        self._perform(self.node.handle(LeasesVoided(voided), self.time()))
                    self._perform(self.node.handle(event, self.time()))
                except Exception as error:  # noqa: BLE001 - a defect of ours ends this life, never the server
                    self._end_life(error, event)
                else:
                    if self.node.state.life.incarnation != life:
                        self._hear(self.on_life)
        finally:
            self._busy = False
        if self.node.state.timers.earliest < self._alarm.at:
            self._alarm.set(self.node.next_deadline())
        if self.on_events:
            self._hear(self.on_events)

    def feed_threadsafe(self, event: Event) -> None:
        """Does the same as `feed`, from any thread. Drops the event if the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self.feed, event)
        except RuntimeError:
            _log.debug("the loop is closed; dropped %s", type(event).__name__)

    def advance(self) -> None:
        """Fires what is due and sets the node's clock, so that the next read sees the present."""
        self.feed(Tick())

    def stop(self) -> None:
        """Stops the timer and fails the calls that still wait."""
        self._alarm.clear()
        gone = Unavailable(Reason.ENGINE_LOST, "the server is stopping")
        for answered in list(self._calls.values()):
            answered(gone)
        self._calls.clear()

    def _perform(self, todo: list[Action]) -> None:
        """Performs all actions, then raises the first exception. A port's KVGrpcError is only logged."""
        defect: Exception | None = None
        for action in todo:
            try:
                self._performers[type(action)](action)
            except KVGrpcError:
                _log.exception("could not perform %s", type(action).__name__)
            except Exception as error:  # noqa: BLE001 - raised below
                defect = defect or error
        if defect is not None:
            raise defect

    def _end_life(self, defect: Exception, event: Event) -> None:
        """Ends the life after a defect: performs the decided actions, replaces the node, and refuses all that wait."""
        self.defects += 1
        _log.error("a defect on %s: %s, and a new one begins", type(event).__name__, MESSAGE, exc_info=defect)
        with suppress(Exception):
            self._perform(self.node.state.actions)
        self.unclosed = self.node.unclosed()
        self.node, ended = self.node.successor(secrets.randbelow(INCARNATION_MAX) + 1, self.time())
        self._mailbox.clear()
        calls, self._calls = self._calls, {}
        for answered in calls.values():
            gone = InternalError(Reason.INTERNAL_DEFECT, MESSAGE, retry_delay_s=RETRY_DELAY_S)
            self._hear([partial(answered, gone)])
        for transfer in ended:
            listeners = (*self.on_transfer, *self.on_end, *self.on_trouble)
            self._hear([partial(listener, transfer) for listener in listeners])
        self._hear(self.on_life)
        self._hear(self.on_defect)

    def _hear(self, listeners: list[Callable[[], None]]) -> None:
        """Calls each listener, whatever the others raise."""
        for listener in listeners:
            try:
                listener()
            except Exception:  # noqa: BLE001 - logged
                _log.exception("could not tell %r", listener)

    def _reply(self, action: Reply) -> None:
        answered = self._calls.pop(action.call_id, None)
        if answered is not None:
            answered(action)

    def _refuse(self, action: actions.Refuse) -> None:
        answered = self._calls.pop(action.call_id, None)
        if answered is not None:
            answered(action.error)

    def _transfer_changed(self, action: actions.TransferChanged) -> None:
        """Tells all listeners, then raises the first exception."""
        defect: Exception | None = None
        transfer = action.transfer
        listeners = self.on_transfer
        if transfer.end_seq == transfer.seq:
            listeners = [*listeners, *self.on_end]
            if transfer.state is not State.SUCCEEDED:
                listeners += self.on_trouble
        for listener in listeners:
            try:
                listener(transfer)
            except Exception as error:  # noqa: BLE001 - raised below
                defect = defect or error
        if defect is not None:
            raise defect

    def _tick(self) -> None:
        deadline = self.node.next_deadline()
        if deadline is not None and deadline <= self.time():
            self.feed(Tick())
        else:
            self._alarm.set(deadline)


def copied(error: KVGrpcError) -> KVGrpcError:
    """Returns a copy of a refusal: one may answer several calls, and each raises an exception object of its own."""
    made = type(error)(
        error.reason,
        error.message,
        violations=error.violations,
        retry_delay_s=error.retry_delay_s,
        metadata=error.metadata,
    )
    made.next = error.next
    return made


def wall_us() -> int:
    """Returns the time of day, in microseconds since the Unix epoch. The node's clock is a different one."""
    return time.time_ns() // 1000


def _tell_lacking(action: actions.BlocksLacking) -> None:
    """Logs which readers hold blocks that a request lacks."""
    named = ", ".join(f"{request} of engine {engine} ({count} here)" for engine, request, count in action.readers)
    more = action.reader_count - len(action.readers)
    _log.warning(
        "request %s lacks %d blocks; %d readers keep some here while they wait for blocks of their own: %s%s; older "
        "requests go first",
        action.request_id, action.blocks, action.reader_count, named, f" and {more} more" if more else "",
    )  # fmt: skip


MAY_BE_GONE = UnmapPeer | AwaitEnd | AnswerSend
"""Commands that have nothing to do for a rank of an earlier life."""


class Ranks:
    """All ranks of an engine, as one RankPort: hands each command to its rank. `ranks` is replaced with every
    incarnation. `unaided`: the data paths over which peers read without help of the ranks.
    """

    def __init__(self, unaided: frozenset[str]) -> None:
        self.ranks: dict[int, RankPort] = {}
        self._unaided = unaided

    def perform(self, action: RankAction) -> None:
        """Hands a command to its rank, or an Expect to all."""
        if isinstance(action, Expect):
            self._expect(action)
        elif action.rank in self.ranks or not isinstance(action, MAY_BE_GONE):
            self.ranks[action.rank].perform(action)

    def _expect(self, action: Expect) -> None:
        if action.paths and not action.writes and self._unaided.issuperset(action.paths):
            return  # each read would wake every rank twice, and make ranks with other paths poll for it
        for rank in self.ranks.values():
            rank.perform(action)
