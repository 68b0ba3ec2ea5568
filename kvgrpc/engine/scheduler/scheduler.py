"""Scheduler: the policy of `kvgrpc.core.policy.policy` on an engine's own session, for an engine's scheduler.

    scheduler = Scheduler(engine)
    admitted = scheduler.arrived(ScheduledRequest("r1", prompt, take=Offer(grant)))     # request came in
    tokens = scheduler.match("r1", hit).tokens                                          # as often as it likes
    scheduler.allocated("r1", table, hit, tokens, after_step=n)
    for told in scheduler.step(): ...                                # each step: LoadEnded, SendEnded, ...
    finished = scheduler.finished("r1", ids, table, computed, Outcome.COMPLETE, step=n)

Hooks are those of the policy. The next `step` sends their calls; only `preempted` and `blocks_needed` may wait.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from kvgrpc.core.actions import Reclaimed
from kvgrpc.core.policy.driver import RENEW_S, DrivenRequest, PolicyDriver
from kvgrpc.core.policy.spec import Offer, Source
from kvgrpc.core.policy.values import (
    Admitted,
    Arrival,
    Begin,
    Finished,
    GiveUp,
    HandOverBlocks,
    HandOverPart,
    Loss,
    ModeChoice,
    News,
    Outcome,
    Provisional,
    RequestSide,
    Reserve,
    ReservedAt,
    Rules,
    Start,
    Table,
)
from kvgrpc.core.values.grants import read_claims
from kvgrpc.core.values.ids import request_label
from kvgrpc.core.values.limits import granted_firm_ttl, granted_ttl
from kvgrpc.core.values.telemetry import MoveTelemetry
from kvgrpc.engine.engine import Engine
from kvgrpc.engine.scheduler.request import ScheduledRequest
from kvgrpc.engine.transfers.events import BlocksReturned, Event, Failed, LayersReceived, Received, Reserved
from kvgrpc.engine.transfers.handles import Handle, HandOver, Pull, content
from kvgrpc.engine.transfers.pushes import Push
from kvgrpc.errors import DeadlineExceeded, InvalidRequest, Reason, Unavailable
from kvgrpc.wire.requests import consumers

TAKEN_BACK_S = 5.0
"""Default time that a preemption waits for blocks that cannot be taken back at once, in seconds. A lead answers in a
millisecond, unless its own postings still read them.
"""
CANCEL_S = 0.05
"""Maximum time that a step waits for the ids of transfers to cancel, in seconds. A lead answers in a millisecond."""
AWAITED = 1024
"""Maximum number of keys that are remembered until their request arrives."""
_UNKNOWN = b"unknown"
"""Opaque id that stands for an unknown prompt; no source has KV of this content."""


@dataclass(eq=False)
class _EngineRequest(DrivenRequest[ScheduledRequest, Sequence[int], Handle]):
    """A request of a Scheduler, in which `given` are token ids."""

    withdrawn: Push | None = None
    """The push that was cancelled to get its blocks back; until they come they may be read."""


class Scheduler(PolicyDriver[ScheduledRequest, _EngineRequest, Handle]):
    """The policy of one engine on its own session. Not thread-safe."""

    def __init__(
        self,
        engine: Engine,
        rules: Rules | None = None,
        *,
        taken_back_s: float = TAKEN_BACK_S,
        renew_s: float = RENEW_S,
        moved: Callable[[MoveTelemetry], None] = lambda _: None,
        takes_parts: bool = True,
    ) -> None:
        """`rules`: the engine's own groups replace their groups. `moved` gets the telemetry of bytes that this engine's
        ranks moved, before the news of that transfer. `takes_parts`: if a source's tokens differ from some point on,
        the KV before that point is taken; otherwise nothing is.
        """
        self.engine = engine
        self._moved, self._takes_parts = moved, takes_parts
        self.taken_back_s = taken_back_s
        self._renew_s, self._renew_at = renew_s, 0.0
        self._news: list[News] = []
        self._awaited: dict[bytes, None] = {}
        """Keys under which destinations have registered and no request has arrived; only the latest are kept."""
        self._cancels: list[Handle] = []
        """Transfers to cancel that have no id yet."""
        super().__init__(replace(rules or Rules(()), groups=engine.pool.groups), self._news.append)

    # -- hooks: see Policy

    def arrived(self, spec: ScheduledRequest) -> Admitted:
        """See `PolicyDriver.arrived`."""
        admitted = super().arrived(spec)
        if spec.transfer_key in self._awaited:
            self._destination_came(spec.transfer_key)
        return admitted

    def refused(self, wanted: ScheduledRequest, message: str) -> None:
        """Refuses a request: the destination that waits for its push is told that none comes. Nothing is said if a
        request that was let in has the same key, since its push does come.
        """
        gives = wanted.give is not None and wanted.give.mode is not ModeChoice.PULL and wanted.give.prefill
        if gives and not self._knows(wanted.transfer_key):
            with suppress(InvalidRequest):  # the key is too short: no destination waits under it
                self.engine.push(wanted.content(()), transfer_key=wanted.transfer_key, **wanted.labels).fail(message)

    def let_go(self, wanted: ScheduledRequest, message: str) -> None:
        """Lets go of a request that ended before its prompt was known here. What it could take is freed at its source,
        by grant or key alone, and the destination that waits for its push is told that none comes. Nothing is let go
        that a request which was let in takes or gives too.

        Raises InvalidRequest (GRANT_INVALID) for a token that is no grant.
        """
        self.refused(wanted, message)
        key, engine = wanted.taken_under, self.engine
        if not key or self._knows(key):
            return
        # Asked for and cancelled at once: the source hears only of the cancel.
        match wanted.take:
            case Offer(grant):
                engine.pull(grant, content(opaque_id=_UNKNOWN, tokens=read_claims(grant).token_count), **wanted.labels)
            case Source(address, engine_id) if address:
                engine.reserve((), content(opaque_id=_UNKNOWN, tokens=1), transfer_key=key, have_tokens=1, use_tokens=1,
                               source_address=address, source_engine_id=engine_id, **wanted.labels)  # fmt: skip
        engine.cancel(key, message)

    def _knows(self, key: bytes) -> bool:
        """Returns whether a request that was let in takes or gives something under this key."""
        return any(key in (known.spec.transfer_key, known.spec.taken_under) for known in self._known.values())

    def preempted(self, request_id: str) -> None:
        """Takes a preempted request's blocks back before it returns. Ends a push whose blocks cannot be taken back at
        once.

        Raises DeadlineExceeded when blocks may still be read after `taken_back_s`: do not reuse them unless a later
        call returns. Raises LeadDied.
        """
        super().preempted(request_id)
        request = self._known.get(request_id)
        if request is not None and request.withdrawn is not None:
            self._await_blocks(request.withdrawn)
            request.withdrawn = None

    def blocks_needed(
        self, count: int, group: int = 0, *, request_time_us: int = 0, request_id: str = "",
        timeout_s: float | None = None,
    ) -> Reclaimed:  # fmt: skip
        """Takes blocks back for a request that waits for blocks, or that would have to be preempted. Raises what
        `Engine.reclaim` raises. The next `step` tells SendEnded of the requests whose blocks are the scheduler's again.
        A preemption is worse: for the hand-overs that are lost here nobody waits, or only younger requests do.
        """
        label = request_label(request_id)
        return self.engine.reclaim(count, group, request_time_us=request_time_us, request_id=label, timeout_s=timeout_s)

    def finished(
        self, request_id: str, ids: Sequence[int], table: Table, computed_tokens: int, outcome: Outcome, step: int = 0
    ) -> Finished:
        """Ends a request that left. `ids`: the tokens of prompt and answer, of which the computed ones name what is
        handed over; empty: the prompt is all.
        """
        first = (lambda tokens: ids[:tokens]) if len(ids) else None
        return self._finish(request_id, first, table, computed_tokens, outcome, step)

    def step(self, timeout_s: float = 0.0) -> list[News]:
        """Sends queued calls and returns news, waiting up to `timeout_s` for the first event.

        Raises LeadDied.
        """
        self._renew_in_time()
        self._poll(0.0 if self._news else timeout_s)
        self._finish_cancels()
        news = self._news.copy()
        self._news.clear()
        return news

    @property
    def busy(self) -> bool:
        """True if a step may tell or send something. Otherwise a step only hears of a lost lead or wanted pushes."""
        return bool(self._known or self._of or self._cancels or self._news)

    def grant(self, request_id: str) -> bytes:
        """Returns the READ grant of what was handed over; empty if there is none."""
        request = self._known.get(request_id)
        handle = request.transfers.get(RequestSide.GIVE) if request is not None else None
        return handle.grant if isinstance(handle, HandOver) else b""

    def push_key(self, request_id: str) -> bytes:
        """Returns the key of the push that was begun; empty if there is none, or it failed."""
        request = self._known.get(request_id)
        handle = request.transfers.get(RequestSide.GIVE) if request is not None else None
        return handle.transfer_key if isinstance(handle, Push) and not handle.failed else b""

    # -- what is asked for

    def _let_in(self, spec: ScheduledRequest, arrival: Arrival) -> _EngineRequest:
        """Raises InvalidRequest for what a hand-over would be refused for, when a destination may wait for it."""
        if arrival.give is not None:
            granted_ttl(spec.ttl_s, self.engine.limits)
            granted_firm_ttl(spec.kept_s, self.engine.limits)
            consumers(spec.consumers)
        return _EngineRequest(spec)

    def _begin(self, request: _EngineRequest, task: Begin) -> Handle:
        spec = request.spec
        return self.engine.pull(
            spec.offer.grant, spec.content(spec.prompt),
            use_tokens=task.use_tokens, priority=spec.priority, request_time_us=spec.request_time_us,
            allow_prefix=self._takes_parts, **spec.labels,
        )  # fmt: skip

    def _start(self, _: _EngineRequest, transfer: Handle, task: Start) -> None:
        assert isinstance(transfer, Pull)
        transfer.start(task.blocks, have_tokens=task.have_tokens, after_step=task.after_step)

    def _reserve(self, request: _EngineRequest, task: Reserve) -> Handle:
        spec = request.spec
        return self.engine.reserve(
            task.blocks, spec.content(spec.prompt[: task.use_tokens]), transfer_key=spec.transfer_key,
            have_tokens=task.have_tokens, use_tokens=task.use_tokens, source_address=spec.source.address,
            source_engine_id=spec.source.engine_id, priority=spec.priority, after_step=task.after_step,
            allow_prefix=self._takes_parts, **spec.labels,
        )  # fmt: skip

    def _hand_over(self, request: _EngineRequest, task: HandOverBlocks) -> Handle:
        spec, given = request.spec, request.given
        assert given is not None, "what is handed over has a name"
        return self.engine.finished_blocks(
            task.blocks, spec.content(given[: task.tokens]), transfer_key=spec.transfer_key,
            ttl_s=spec.ttl_s, firm_ttl_s=spec.kept_s, consumers=spec.consumers, on_abort=spec.on_abort,
            after_step=task.after_step, request_time_us=spec.request_time_us,
            takes_registrations=spec.give is not None and spec.give.prefill, **spec.labels,
        )  # fmt: skip

    def _say(self, request: _EngineRequest, say: Callable[[Push], None]) -> Push:
        """Calls `say` with the request's push, or with a new one, which begins only if `say` does not raise."""
        spec, ids = request.spec, () if request.given is None else request.given
        push = request.transfers.get(RequestSide.GIVE) or self.engine.push(
            spec.content(ids), transfer_key=spec.transfer_key, consumers=spec.consumers,
            on_abort=spec.on_abort, priority=spec.priority, firm_ttl_s=spec.kept_s, **spec.labels,
        )  # fmt: skip
        assert isinstance(push, Push)
        if not push.content.tokens:  # begun before its content was known
            push.content = spec.content(ids)
        say(push)
        return push

    def _register(self, request: _EngineRequest) -> Handle:
        return self._say(request, lambda push: push.register(request.spec.target))

    def _part(self, request: _EngineRequest, task: HandOverPart) -> Handle:
        def hand_over(push: Push) -> None:
            push.finished(task.blocks, layers=task.layers, last=task.last, after_step=task.after_step)

        return self._say(request, hand_over)

    def _give_up(self, request: _EngineRequest, task: GiveUp) -> Handle | None:
        push = request.transfers.get(RequestSide.GIVE)
        if push is not None and push.over:
            return None
        return self._say(request, lambda push: push.fail(task.message))

    def _start_over(self, request: _EngineRequest, transfer: Handle) -> None:
        assert isinstance(transfer, Push), "parts of it were handed over"
        if not transfer.start_over():
            # Without a void slot only the lead knows when nothing reads the blocks, and for a push that goes on it says
            # so only once the next prefill has a part.
            transfer.cancel("its prefill was preempted, and its blocks could not be taken back at once")
            request.withdrawn = transfer

    def _end(self, _: _EngineRequest, transfer: Handle, message: str) -> None:
        transfer.cancel(message)
        if not transfer.transfer_id:
            self._cancels.append(transfer)

    # -- what is waited for

    def _await_blocks(self, push: Push) -> None:
        deadline = time.monotonic() + self.taken_back_s
        while not push.over:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                what = f"blocks of {push.request_id} may still be read: keep them, or end this engine"
                raise DeadlineExceeded(Reason.DEADLINE, what, metadata={"phase": "taking back"})
            self._poll(left_s)

    def _finish_cancels(self) -> None:
        """Waits shortly for the ids that pending cancels need: this may be an engine's last step for a long time."""
        if not self._cancels:
            return
        deadline = time.monotonic() + CANCEL_S
        while any(map(_unnamed, self._cancels)) and time.monotonic() < deadline:
            self._poll(CANCEL_S)
        self._cancels = [handle for handle in self._cancels if _unnamed(handle)]
        self.engine.flush()

    def _renew_in_time(self) -> None:
        now = time.monotonic()
        if now >= self._renew_at:
            self._renew_at = now + self._renew_s
            self.renew_awaited()

    def _renew(self, requests: list[_EngineRequest]) -> None:
        source, keys = requests[0].spec.source, [request.spec.transfer_key for request in requests]
        with suppress(Unavailable):  # a lead that died takes no push either
            self.engine.renew_keys(source.address, keys, source.engine_id)

    # -- destinations that come before there is anything for them

    def _destination_came(self, key: bytes) -> None:
        """Begins to push to a destination that registered. The lead tells a destination whose request is not known here
        that nothing comes, unless the request arrives in time.
        """
        self._awaited.pop(key, None)
        for request in self._known.values():
            if request.spec.give is not None and request.spec.transfer_key == key:
                self.wanted(request.id)
                with suppress(Unavailable):  # a lead that died has no destinations either
                    self.engine.push(content(), transfer_key=key).expect()
                return
        self._awaited[key] = None
        if len(self._awaited) > AWAITED:
            del self._awaited[next(iter(self._awaited))]

    # -- how transfers fare

    def _poll(self, timeout_s: float) -> None:
        for event in self.engine.poll(timeout_s):
            self._hear(event)
        wanted = self.engine.take_pushes_wanted()
        for key in wanted:
            self._destination_came(key)
        if wanted:  # the next step may come late
            self.engine.flush()

    def _hear(self, event: Event) -> None:
        match event:
            case Reserved(transfer) | LayersReceived(transfer):
                found = self._find(transfer)
                if found is not None:
                    self._provide(found[0], event)
            case Failed(transfer):
                self._failed(transfer, _loss(event))
            case Received(transfer, tokens, telemetry):
                if telemetry is not None:
                    self._moved(telemetry)
                self._returned(transfer, received=tokens)
            case BlocksReturned(transfer, telemetries):
                for each in telemetries:
                    self._moved(each)
                self._returned(transfer)

    def _provide(self, request: _EngineRequest, event: Reserved | LayersReceived) -> None:
        if isinstance(event, LayersReceived):
            self._tell(Provisional(request.id, event.layers_done, event.part_epoch))
        elif not request.spec.source.address:
            self._tell(ReservedAt(request.id, event.transfer.grant))


def _unnamed(handle: Handle) -> bool:
    """Returns whether the lead has yet to name the transfer. A lead that died names none."""
    return not (handle.transfer_id or handle.over or handle.lost)


def _loss(event: Failed) -> Loss:
    return Loss(event.reason, event.message, event.next, event.phase, event.side, event.rank)
