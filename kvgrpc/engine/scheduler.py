"""Scheduler: the policy of `kvgrpc.core.policy.policy` on an engine's own session, for an engine's scheduler.

    scheduler = Scheduler(engine)
    admitted = scheduler.arrived(Wanted("r1", prompt, take=Offer(grant)))     # request came in
    tokens = scheduler.match("r1", hit).tokens                                # as often as it likes
    scheduler.allocated("r1", table, hit, tokens, after_step=n)
    for told in scheduler.step(): ...                                         # each step: LoadEnded, SendEnded, ...
    finished = scheduler.finished("r1", ids, table, computed, Outcome.COMPLETE, step=n)

All hooks are those of the policy; each sends what it leads to with the next `step`, and none waits.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvgrpc.core.policy.policy import Policy
from kvgrpc.core.policy.values import (
    Admitted,
    Begin,
    Cancel,
    Finished,
    GiveUp,
    HandOver,
    Loss,
    Match,
    Mode,
    News,
    Outcome,
    Part,
    Provisional,
    Reserve,
    ReservedAt,
    Rules,
    Side,
    Start,
    StartOver,
    Table,
    Task,
)
from kvgrpc.core.tables.transfers import Next
from kvgrpc.core.values.grants import read_claims
from kvgrpc.engine.engine import Engine
from kvgrpc.engine.events import BlocksReturned, Event, Failed, LayersReceived, Received, Reserved
from kvgrpc.engine.handles import Handle, HandOver as HandOverHandle, Pull, content
from kvgrpc.engine.pushes import Push, Reservation
from kvgrpc.engine.request import Offer, ScheduledRequest, Source
from kvgrpc.errors import DeadlineExceeded, InvalidRequest, KVGrpcError, Reason

TAKEN_BACK_S = 5.0
"""So long a preemption waits for blocks that cannot be taken back at once: a lead answers in a millisecond, unless its
own postings still read them.
"""
CANCEL_S = 0.05
"""So long a step waits for the names of transfers that are to be cancelled: a lead answers in a millisecond."""
_UNKNOWN = b"unknown"
"""In place of the content of a prompt that is not known: nothing that a source has is of it."""


@dataclass(eq=False)
class _Handles:
    wanted: ScheduledRequest
    given: Sequence[int]
    """Tokens whose KV goes."""
    take: Pull | Reservation | None = None
    give: HandOverHandle | Push | None = None
    withdrawn: Push | None = None
    """What was cancelled so that its blocks come back: until then they may be read."""


class Scheduler:
    """Of one engine. Not for several threads at once."""

    def __init__(self, engine: Engine, rules: Rules | None = None, *, taken_back_s: float = TAKEN_BACK_S) -> None:
        """`rules`: the groups are the engine's own in any case."""
        self.engine = engine
        self.taken_back_s = taken_back_s
        self.policy = Policy(replace(rules or Rules(()), groups=engine.pool.groups))
        self._known: dict[str, _Handles] = {}
        self._of: dict[Handle, tuple[str, Side]] = {}
        self._news: list[News] = []
        self._cancels: list[Handle] = []
        """Of transfers that the lead has not named yet."""
        self._perform: dict[type[Task], Callable[[_Handles, Any], None]] = {
            Begin: self._begin,
            Start: self._start,
            Reserve: self._reserve,
            HandOver: self._hand_over,
            Part: self._part,
            StartOver: self._start_over,
            GiveUp: self._give_up,
            Cancel: self._cancel,
        }

    # -- hooks: see Policy

    def arrived(self, wanted: ScheduledRequest) -> Admitted:
        """Raises what `Policy.arrived` raises; InvalidRequest (GRANT_INVALID) for what is no grant, or for a key that
        is too short; PreconditionFailed (GRANT_WRONG_ACCESS) for a grant of the other kind; Unavailable (ENGINE_LOST)
        for one with a target while there is no lead. Then nothing has changed.
        """
        arrival = wanted.arrival(self.policy.rules)
        admitted = self.policy.admits(arrival)
        if wanted.request_id not in self.policy:
            handles = _Handles(wanted, wanted.prompt[: admitted.prompt_tokens])
            if wanted.target and wanted.prompt:
                self._push(handles, lambda push: push.register(wanted.target))
            self._known[wanted.request_id] = handles
        self.policy.arrived(arrival)
        self._settle()
        return admitted

    def refused(self, wanted: ScheduledRequest, message: str) -> None:
        """A request that this scheduler does not let in: whoever waits for its push learns that none comes. Under the
        key of a request that it has let in, one does.
        """
        gives = wanted.give is not None and wanted.give.mode is Mode.PUSH and wanted.give.prefill
        if gives and not self._knows(wanted.transfer_key):
            with suppress(InvalidRequest):  # of a key that is too short: nobody waits under one
                self.engine.push(wanted.content(()), transfer_key=wanted.transfer_key, **wanted.labels).fail(message)

    def let_go(self, wanted: ScheduledRequest, message: str) -> None:
        """A request that is over before its prompt is known here: what it could take is freed at its source, by its
        grant or key alone, and whoever waits for its push learns that none comes. By what a request that was let in
        takes or gives, too, nothing is let go.

        Raises InvalidRequest (GRANT_INVALID) for what is no grant.
        """
        self.refused(wanted, message)
        key, engine = wanted.taken_under, self.engine
        if not key or self._knows(key):
            return
        # Asked for and cancelled at once: what the source hears of is the cancel.
        match wanted.take:
            case Offer(grant):
                engine.pull(grant, content(opaque_id=_UNKNOWN, tokens=read_claims(grant).token_count), **wanted.labels)
            case Source(address, engine_id) if address:
                engine.reserve((), content(opaque_id=_UNKNOWN, tokens=1), transfer_key=key, have_tokens=1, use_tokens=1,
                               source_address=address, source_engine_id=engine_id, **wanted.labels)  # fmt: skip
        engine.cancel(key, message)

    def _knows(self, key: bytes) -> bool:
        """Whether a request that was let in takes or gives something under that key."""
        return any(key in (known.wanted.transfer_key, known.wanted.taken_under) for known in self._known.values())

    def match(self, request_id: str, computed_tokens: int) -> Match:
        return self.policy.match(request_id, computed_tokens)

    def allocated(
        self, request_id: str, table: Table, computed_tokens: int, external_tokens: int, after_step: int = 0
    ) -> None:
        self.policy.allocated(request_id, table, computed_tokens, external_tokens, after_step)
        self._settle()

    def computed(self, request_id: str, table: Table, computed_tokens: int, step: int) -> None:
        self.policy.computed(request_id, table, computed_tokens, step)
        self._settle()

    def preempted(self, request_id: str) -> None:
        """The blocks are the scheduler's when this returns. Where they cannot be taken back at once, their push ends.

        Raises DeadlineExceeded when they may still be read after `taken_back_s`. They are not to be reused then, unless
        a later call returns. Raises LeadDied.
        """
        self.policy.preempted(request_id)
        self._settle()
        handles = self._known.get(request_id)
        if handles is not None and handles.withdrawn is not None:
            self._await_blocks(handles.withdrawn)
            handles.withdrawn = None

    def finished(
        self, request_id: str, ids: Sequence[int], table: Table, computed_tokens: int, outcome: Outcome, step: int = 0
    ) -> Finished:
        """`ids`: the tokens of prompt and answer; those that were computed name what is handed over."""
        handles = self._known.get(request_id)
        if handles is not None and handles.wanted.give is not None and not handles.wanted.give.prefill:
            handles.given = ids[: self.policy.given_tokens(request_id, computed_tokens, outcome)] or handles.given
        finished = self.policy.finished(request_id, table, computed_tokens, outcome, step)
        self._settle()
        return finished

    def aborted(self, request_id: str, message: str = "aborted") -> Finished:
        finished = self.policy.aborted(request_id, message)
        self._settle()
        return finished

    def loaded(self, request_id: str) -> None:
        self.policy.loaded(request_id)
        self._settle()

    def step(self, timeout_s: float = 0.0) -> list[News]:
        """Sends what is queued and tells what happened, waiting up to `timeout_s` for the first event.

        Raises LeadDied.
        """
        if self._news:
            timeout_s = 0.0
        for event in self.engine.poll(timeout_s):
            self._hear(event)
        self._settle()
        self._finish_cancels()
        news, self._news = self._news, []
        return news

    @property
    def busy(self) -> bool:
        """Whether a step may tell or send something. Else all that it could hear of is that its lead is gone."""
        return bool(self._known or self._of or self._cancels or self._news)

    def grant(self, request_id: str) -> bytes:
        """The READ grant of what was handed over; empty where there is none."""
        handles = self._known.get(request_id)
        return handles.give.grant if handles is not None and isinstance(handles.give, HandOverHandle) else b""

    # -- tasks

    def _settle(self) -> None:
        """Performs what the policy decided, until it decides nothing more."""
        while tasks := self.policy.take_tasks():
            for task in tasks:
                handles = self._known.get(task.request_id)
                if handles is not None:
                    side = Side.TAKE if isinstance(task, Begin | Start | Reserve) else Side.GIVE
                    self._attempt(handles, side, partial(self._perform[type(task)], handles, task))
        self._news += self.policy.take_told()
        for request_id in [id_ for id_ in self._known if id_ not in self.policy]:
            del self._known[request_id]

    def _attempt(self, handles: _Handles, side: Side, ask: Callable[[], None]) -> None:
        """What cannot even be asked for is a loss like any other."""
        try:
            ask()
        except KVGrpcError as error:
            request_id, handle = handles.wanted.request_id, handles.take if side is Side.TAKE else handles.give
            self.policy.failed(request_id, side, Loss(error.reason, error.message, Next.RECOMPUTE))
            if handle is None or handle.over:
                self.policy.returned(request_id, side)
            else:
                handle.cancel(error.message)

    def _begin(self, handles: _Handles, task: Begin) -> None:
        wanted = handles.wanted
        assert isinstance(wanted.take, Offer)
        handles.take = self.engine.pull(
            wanted.take.grant, wanted.content(wanted.prompt),
            use_tokens=task.use_tokens, priority=wanted.priority, **wanted.labels,
        )  # fmt: skip
        self._of[handles.take] = wanted.request_id, Side.TAKE

    def _start(self, handles: _Handles, task: Start) -> None:
        if isinstance(handles.take, Pull) and not handles.take.over:
            handles.take.start(task.blocks, have_tokens=task.have_tokens, after_step=task.after_step)

    def _reserve(self, handles: _Handles, task: Reserve) -> None:
        wanted = handles.wanted
        assert isinstance(wanted.take, Source)
        handles.take = self.engine.reserve(
            task.blocks, wanted.content(wanted.prompt[: task.use_tokens]), transfer_key=wanted.transfer_key,
            have_tokens=task.have_tokens, use_tokens=task.use_tokens, source_address=wanted.take.address,
            source_engine_id=wanted.take.engine_id, priority=wanted.priority, after_step=task.after_step,
            **wanted.labels,
        )  # fmt: skip
        self._of[handles.take] = wanted.request_id, Side.TAKE

    def _hand_over(self, handles: _Handles, task: HandOver) -> None:
        wanted = handles.wanted
        handles.give = self.engine.finished_blocks(
            task.blocks, wanted.content(handles.given[: task.tokens]), transfer_key=wanted.transfer_key,
            ttl_s=wanted.ttl_s, consumers=wanted.consumers, on_abort=wanted.on_abort, after_step=task.after_step,
            **wanted.labels,
        )  # fmt: skip
        self._of[handles.give] = wanted.request_id, Side.GIVE

    def _push(self, handles: _Handles, say: Callable[[Push], None]) -> None:
        """Says something of a request's push. One of which nothing could be said does not begin."""
        wanted = handles.wanted
        push = handles.give or self.engine.push(
            wanted.content(handles.given), transfer_key=wanted.transfer_key, consumers=wanted.consumers,
            on_abort=wanted.on_abort, priority=wanted.priority, **wanted.labels,
        )  # fmt: skip
        assert isinstance(push, Push)
        say(push)
        handles.give = push
        self._of[push] = wanted.request_id, Side.GIVE

    def _part(self, handles: _Handles, task: Part) -> None:
        def hand_over(push: Push) -> None:
            push.finished(task.blocks, layers=task.layers, last=task.last, after_step=task.after_step)

        self._push(handles, hand_over)

    def _give_up(self, handles: _Handles, task: GiveUp) -> None:
        if handles.give is None or not handles.give.over:
            self._push(handles, lambda push: push.fail(task.message))

    def _start_over(self, handles: _Handles, _: StartOver) -> None:
        push = handles.give
        assert isinstance(push, Push), "parts of it were handed over"
        if not push.over and not push.start_over():
            # Without a void slot the lead alone says when nothing reads them, and of a push that goes on it says so
            # only once the next prefill has a part.
            push.cancel("its prefill was preempted, and its blocks could not be taken back at once")
            handles.withdrawn = push

    def _await_blocks(self, push: Push) -> None:
        deadline = time.monotonic() + self.taken_back_s
        while not push.over:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                what = f"blocks of {push.request_id} may still be read: keep them, or end this engine"
                raise DeadlineExceeded(Reason.DEADLINE, what, metadata={"phase": "taking back"})
            for event in self.engine.poll(left_s):
                self._hear(event)
        self._settle()

    def _cancel(self, handles: _Handles, task: Cancel) -> None:
        handle = handles.take if task.side is Side.TAKE else handles.give
        if handle is not None:
            handle.cancel(task.message)
            if not handle.transfer_id:
                self._cancels.append(handle)

    def _finish_cancels(self) -> None:
        """A cancel goes out once the lead has named its transfer. This may be an engine's last step for a long time."""
        if not self._cancels:
            return
        deadline = time.monotonic() + CANCEL_S
        while any(map(_unnamed, self._cancels)) and time.monotonic() < deadline:
            for event in self.engine.poll(CANCEL_S):
                self._hear(event)
        self._cancels = [handle for handle in self._cancels if _unnamed(handle)]
        self._settle()
        self.engine.flush()

    # -- events

    def _hear(self, event: Event) -> None:
        request_id, side = self._of.get(event.transfer, ("", Side.TAKE))
        if not request_id:
            return
        match event:
            case Reserved():
                take = self._known[request_id].wanted.take if request_id in self._known else None
                if isinstance(take, Source) and not take.address:
                    self._news.append(ReservedAt(request_id, event.transfer.grant))
            case LayersReceived():
                self._news.append(Provisional(request_id, event.layers_done, event.part_epoch))
            case Failed():
                self.policy.failed(request_id, side, _loss(event))
            case Received():
                del self._of[event.transfer]
                self.policy.received(request_id)
            case BlocksReturned():
                del self._of[event.transfer]
                self.policy.returned(request_id, side)


def _unnamed(handle: Handle) -> bool:
    """Whether the lead is still to name its transfer. One that died does not."""
    return not (handle.transfer_id or handle.over or handle.lost)


def _loss(event: Failed) -> Loss:
    return Loss(event.reason, event.message, event.next, event.phase, event.side, event.rank)
