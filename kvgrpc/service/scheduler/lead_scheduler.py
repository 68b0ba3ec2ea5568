"""A scheduler's hooks at the lead: the policy's driver with the node's transfers.

The policy's tasks become the same events that HandoffService makes of its calls, for the same caller, so transfers,
leases and blocks are treated alike. The runner tells how transfers change. The node answers before `Runner.submit`
returns, because no hook is called while the runner is busy: when a hook returns, its work is done.
"""

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from kvgrpc.core import actions, events
from kvgrpc.core.actions import Reply
from kvgrpc.core.policy.driver import RENEW_S, DrivenRequest, PolicyDriver
from kvgrpc.core.policy.spec import Source
from kvgrpc.core.policy.values import (
    Admitted,
    Arrival,
    Begin,
    Finished,
    GiveUp,
    HandOverBlocks,
    HandOverPart,
    Load,
    LoadEnded,
    Loss,
    News,
    Outcome,
    Provisional,
    RequestSide,
    Reserve,
    ReservedAt,
    Rules,
    Save,
    Start,
    Table,
)
from kvgrpc.core.tables.ledger import Ledger, RowKind
from kvgrpc.core.tables.transfers import State, Transfer
from kvgrpc.core.values.content import ContentId
from kvgrpc.core.values.grants import read_claims
from kvgrpc.core.values.ids import ACCESS_ID_BYTES
from kvgrpc.core.values.limits import granted_ttl
from kvgrpc.core.values.owners import ANONYMOUS, ENGINE, Thing, ThingKind, Verb, may, tenant_of, within
from kvgrpc.core.values.request_times import RequestTime
from kvgrpc.errors import KVGrpcError, NextStep, PermissionDenied, Reason, full
from kvgrpc.service.callers import PRINCIPAL, payer
from kvgrpc.service.grpc_status import next_step
from kvgrpc.service.lead import Lead
from kvgrpc.service.places import CONNECTION
from kvgrpc.service.runner import Alarm
from kvgrpc.service.scheduler.news import NEWS_MAX, NewsLog
from kvgrpc.service.scheduler.scheduler_callers import SchedulerCallers
from kvgrpc.wire.scheduler import NamedRequest, PromptName, block_ids, prompt_bytes

REQUEST_BYTES = 6_000
"""Kept bytes of a request without its prompt's content and its blocks: here, in the policy, and in the ledger."""
NEWS_BYTES = 1_000
BLOCK_BYTES = 40
"""Kept bytes of a block in a list of the policy's."""
_Gives = events.FinishedBlocks | events.RegisterPush | events.ReclaimBlocks | events.RenewLeases
_Event = events.PullBlocks | events.GiveDestination | events.ReserveBlocks | _Gives


@dataclass(eq=False)
class _LeadRequest(DrivenRequest[NamedRequest, ContentId, str]):
    """A request as the driver keeps it. `given` is a ContentId; transfers are named by their ids."""

    grant: bytes = b""
    """The READ grant of the hand-over."""
    lease_id: str = ""
    """The lease of a push's parts in this epoch."""
    part_epoch: int = 0
    provisional: Provisional | None = None
    """The last news of this kind that was told."""
    principal: str = ANONYMOUS
    """The principal that owns the request."""
    caller: str = ""
    """The caller that brought the request; its share pays for the kept bytes."""
    prompt_bytes: int = 0

    @property
    def kept_bytes(self) -> int:
        """Kept bytes without the blocks. The content it gives has its own name, as long as the prompt's."""
        return REQUEST_BYTES + self.prompt_bytes


class LeadScheduler(PolicyDriver[NamedRequest, _LeadRequest, str]):
    """The scheduler of this server's engine."""

    def __init__(self, lead: Lead) -> None:
        self._lead = lead
        self._runner = lead.runner
        self._callers = SchedulerCallers()
        self._alarm = Alarm(self._end_silent)
        self._renewing, self._renewals = False, Alarm(self._renew_again)
        self.news = NewsLog(self._keep_news)
        super().__init__(self._rules(), self._add_news)
        lead.runner.on_life.append(self._begin_anew)

    # -- hooks: see PolicyDriver

    def arrived(self, spec: NamedRequest) -> Admitted:
        """Raises Exhausted (LIMIT_EXCEEDED) also if the kept bytes have no room."""
        known = self._known.get(spec.request_id)
        if known is None:
            nbytes = REQUEST_BYTES + prompt_bytes(spec)
            self._ledger.check(payer(), nbytes)
        if self._changed not in self._runner.on_transfer:
            self._runner.on_transfer.append(self._changed)
        admitted = super().arrived(spec)
        request = self._known.get(spec.request_id)
        if known is None and request is not None:
            self._ledger.keep(RowKind.REQUEST, request.id, request.caller, request.kept_bytes)
        self.hear(spec.request_id)
        if not self._renewing and isinstance(spec.take, Source):
            self._renew_again()
        return admitted

    def allocated(
        self, request_id: str, table: Table, computed_tokens: int, external_tokens: int, after_step: int = 0
    ) -> None:
        """Raises Exhausted (LIMIT_EXCEEDED) also if the blocks' kept bytes have no room."""
        request, nbytes = self._known.get(request_id), BLOCK_BYTES * sum(map(len, table))
        if request is not None:
            self._ledger.check(request.caller, nbytes)
        super().allocated(request_id, table, computed_tokens, external_tokens, after_step)
        if self._known.get(request_id) is request is not None:
            self._ledger.weigh(RowKind.REQUEST, request_id, request.kept_bytes + nbytes)

    def hear(self, *request_ids: str) -> None:
        """Notes that the scheduler was heard, and spoke of these requests, if any."""
        caller, now = CONNECTION.get(), self._runner.time()
        self._callers.hear(caller, now)
        for request_id in request_ids:
            if request_id in self._known:
                self._callers.take(request_id, caller, now)
        self._wait_for_silence()

    def computed(self, request_id: str, table: Table, computed_tokens: int, step: int) -> None:
        """Raises Exhausted (LIMIT_EXCEEDED) if the news of a save would have no place."""
        if self.policy.rules.staged:
            self._check_news()
        super().computed(request_id, table, computed_tokens, step)

    def finished(
        self, request_id: str, named: PromptName | None, table: Table, computed: int, outcome: Outcome, step: int
    ) -> tuple[Finished, bytes]:
        """Returns also the READ grant, if any. `named`: the contents of prompt and answer; None: the prompt is all.

        Raises OutOfRange (CONTENT_RANGE) if nothing names the tokens that are handed over.
        """
        request = self._known.get(request_id)
        finished = self._finish(request_id, named.first if named else None, table, computed, outcome, step)
        if request is None:
            return finished, b""
        handed_over = finished.handed_over and bool(request.grant or request.lease_id)  # the node may have refused it
        return replace(finished, handed_over=handed_over), request.grant

    def blocks_needed(self, counts: tuple[tuple[int, int], ...], by: RequestTime | None = None) -> actions.Reclaimed:
        """Reclaims blocks (group, count) that the scheduler lacks for that request: blocks of soft leases, and of
        younger readers that wait. See `Reclaims`.

        Raises InvalidRequest or OutOfRange.
        """
        principal = PRINCIPAL.get() if self._lead.runner.node.state.life.attached else ENGINE
        answer: actions.Reclaimed = self._ask(
            events.ReclaimBlocks(events.Call(self._runner.next_call_id(), principal), counts, by=by)
        )
        return answer

    def is_foreign(self, request_id: str) -> bool:
        """Returns whether a request is another tenant's. Raises PermissionDenied (NOT_OWNER) for another stranger's."""
        caller, request = PRINCIPAL.get(), self._known.get(request_id)
        if request is None or may(caller, Verb.SCHEDULE, Thing(ThingKind.REQUEST, request.principal)):
            return False
        if within(caller, tenant_of(request.principal)):
            raise PermissionDenied(Reason.NOT_OWNER, "another caller schedules the request of that name")
        return True

    # -- checks of a request before it is known

    def _let_in(self, spec: NamedRequest, arrival: Arrival) -> _LeadRequest:
        state = self._lead.runner.node.state
        state.life.engine  # noqa: B018 - raises if there is no pool
        for address in spec.addresses:
            self._lead.check_dial(address)
        granted_ttl(spec.ttl_s, state.limits)
        if arrival.take is not None or arrival.give is not None:
            state.pool.check_open()
        self._check_news()
        return _LeadRequest(spec, principal=PRINCIPAL.get(), caller=payer(), prompt_bytes=prompt_bytes(spec))

    def _check_news(self) -> None:
        self._ledger.check(payer(), 0)
        if (unread := self.news.count(PRINCIPAL.get())) >= NEWS_MAX:
            raise full(f"{unread} news were not read: say up to which number you have them", NEWS_MAX)

    # -- kept bytes

    @property
    def _ledger(self) -> Ledger:
        return self._lead.runner.node.state.ledger

    def _add_news(self, news: News) -> None:
        request = self._known.get(news.request_id)
        self.news.add(request.principal if request else PRINCIPAL.get(), news)

    def _keep_news(self, seq: int, news: News | None) -> None:
        """Keeps news until they are read; `news` is None when they were."""
        if news is None:
            self._ledger.drop(RowKind.NEWS, seq)
            return
        request = self._known.get(news.request_id)
        lists = news.blocks if isinstance(news, LoadEnded | Load | Save) else ()
        nbytes = NEWS_BYTES + BLOCK_BYTES * sum(map(len, lists))
        self._ledger.keep(RowKind.NEWS, seq, request.caller if request else "", nbytes)

    def _forgotten(self, request: _LeadRequest) -> None:
        self._ledger.drop(RowKind.REQUEST, request.id)
        self._callers.forget(request.id)

    def _wait_for_silence(self) -> None:
        heard = self._callers.last_heard()
        self._alarm.set(None if heard is None else heard + self._lead.config.limits.request_ttl_s)

    def _end_silent(self) -> None:
        ttl_s = self._lead.config.limits.request_ttl_s
        for request_id in self._callers.silent(self._runner.time() - ttl_s):
            self._callers.forget(request_id)  # before the abort: its transfers may go on
            self.aborted(request_id, f"its scheduler has said nothing for {ttl_s:g} s")
        self._wait_for_silence()

    def _renew_again(self) -> None:
        self._renewing = self.renew_awaited()
        self._renewals.set(self._runner.time() + RENEW_S if self._renewing else None)

    # -- requests to the node

    def _renew(self, requests: list[_LeadRequest]) -> None:
        first = requests[0]
        source = events.PushSource(first.spec.source.address, first.spec.source.engine_id)
        refs = tuple(events.LeaseRef(key=request.spec.transfer_key) for request in requests)
        call = replace(self._call(first), connection=first.caller)  # the first request's caller pays for the dials
        with suppress(KVGrpcError):
            self._ask(events.RenewLeases(call, refs, source=source))

    def _call(self, request: _LeadRequest) -> events.Call:
        return events.Call(
            self._runner.next_call_id(), request.principal, request.spec.traceparent, on_behalf_of=request.caller
        )

    def _ask(self, event: _Event) -> Any:
        """Returns the node's answer. Raises its refusal."""
        replies: list[Reply | KVGrpcError] = []
        self._runner.submit(event.call.id, event, replies.append)
        (reply,) = replies
        if isinstance(reply, KVGrpcError):
            raise reply
        return reply.answer

    def _loss(self, error: KVGrpcError) -> Loss:
        return Loss(error.reason, error.sentence, next_step(error))

    def _register(self, request: _LeadRequest) -> str:
        ids = os.urandom(ACCESS_ID_BYTES), os.urandom(ACCESS_ID_BYTES)
        event = events.RegisterPush(self._call(request), request.spec.target, request.spec.label, *ids)
        answer: actions.Registered = self._ask(event)
        return _id(answer.transfer)

    def _begin(self, request: _LeadRequest, task: Begin) -> str:
        spec, use = request.spec, task.use_tokens
        answer: actions.PullStarted = self._ask(
            events.PullBlocks(
                self._call(request), spec.offer.grant,
                spec.named.with_digest(use or read_claims(spec.offer.grant).token_count),
                os.urandom(ACCESS_ID_BYTES), use, request_id=spec.label, priority=spec.priority,
                request_time_us=spec.request_time_us, allow_prefix=True,
            )
        )  # fmt: skip
        return _id(answer.transfer)

    def _start(self, request: _LeadRequest, transfer: str, task: Start) -> None:
        destination = events.Destination(block_ids(task.blocks), task.have_tokens)
        self._ask(events.GiveDestination(self._call(request), transfer, destination, task.after_step))

    def _reserve(self, request: _LeadRequest, task: Reserve) -> str:
        spec, take = request.spec, request.spec.source
        source = events.PushSource(take.address, take.engine_id) if take.address else None
        named = spec.transfer_key, block_ids(task.blocks), spec.named.beginning(task.use_tokens)
        tokens = task.have_tokens, task.use_tokens, source
        reserve = events.ReserveBlocks(
            self._call(request), *named, *tokens, spec.label, spec.priority, task.after_step, allow_prefix=True
        )
        answer: actions.BlocksReserved = self._ask(reserve)
        if source is None:
            self._tell(ReservedAt(request.id, answer.token))
        return _id(answer.transfer)

    def _hand_over(self, request: _LeadRequest, task: HandOverBlocks) -> str:
        spec = request.spec
        answer: actions.HandedOver = self._ask(
            events.FinishedBlocks(
                self._call(request), spec.transfer_key, block_ids(task.blocks), request.given, spec.ttl_s,
                spec.consumers, spec.on_abort, spec.label, spec.priority, task.after_step, firm_ttl_s=spec.kept_s,
                request_time_us=spec.request_time_us,
            )
        )  # fmt: skip
        request.grant = answer.token
        return _id(answer.transfer)

    def _part(self, request: _LeadRequest, task: HandOverPart) -> str:
        spec = request.spec
        answer: actions.HandedOver = self._ask(
            events.FinishedBlocks(
                self._call(request), spec.transfer_key, block_ids(task.blocks), request.given, None, spec.consumers,
                spec.on_abort, spec.label, spec.priority, task.after_step, request.lease_id,
                waits_for=events.WaitsFor.REGISTRATION, last=task.last, layers=task.layers,
                part_epoch=request.part_epoch, firm_ttl_s=spec.kept_s,
            )
        )  # fmt: skip
        request.lease_id = answer.lease.id
        return _id(answer.transfer)

    def _give_up(self, request: _LeadRequest, task: GiveUp) -> str | None:
        why, waits_for = task.message or "the source cannot deliver", events.WaitsFor.REGISTRATION
        nothing = request.spec.transfer_key, (), None
        finished = events.FinishedBlocks(self._call(request), *nothing, waits_for=waits_for, failure=why)
        answer: actions.GaveUp = self._ask(finished)
        return answer.transfer.id if answer.transfer else None

    def _start_over(self, request: _LeadRequest, _: str) -> None:
        """Takes the blocks back, as an engine with a void page does: reads of them settle STALE from now on."""
        if request.lease_id:
            self._runner.feed(events.LeasesVoided((request.lease_id,)))
            request.part_epoch += 1
            request.lease_id = ""

    def _end(self, request: _LeadRequest, transfer: str, message: str) -> None:
        call = self._call(request)
        self._runner.submit(
            call.id,
            events.CancelTransfer(call, transfer, message=message, scope=events.CancelScope.ON_ABORT),
            lambda _: None,
        )

    # -- changes of transfers

    def _follow(self, request: _LeadRequest, side: RequestSide, transfer: str | None) -> None:
        """Applies the transfer's present state: changes before this call were not heard."""
        super()._follow(request, side, transfer)
        if transfer is None:
            return
        if (now := self._lead.runner.node.state.transfers.find(transfer)) is not None:
            self._changed(now)
        else:  # the transfer's life is over
            self._returned(transfer)

    def _changed(self, transfer: Transfer) -> None:
        if transfer.id not in self._of:
            return
        found, succeeded = self._find(transfer.id), transfer.state is State.SUCCEEDED
        if found is not None and not transfer.over and found[1] is RequestSide.TAKE:
            self._provide(found[0], Provisional(found[0].id, transfer.layers_done, transfer.part_epoch))
        if transfer.over and not succeeded:
            self._failed(transfer.id, _loss(transfer))
        if transfer.settled:
            self._returned(transfer.id, received=transfer.use_tokens if succeeded else 0)

    def _provide(self, request: _LeadRequest, layers: Provisional) -> None:
        if layers != request.provisional and (layers.layers_done or request.provisional):
            request.provisional = layers
            self._tell(layers)

    def _rules(self) -> Rules:
        description = self._lead.runner.node.state.life.description
        return self._lead.config.scheduler.rules(description.pool.groups if description else ())

    def _begin_anew(self) -> None:
        self._begin_life(self._rules())
        self._callers = SchedulerCallers()
        self.news.begin()


def _id(transfer: Transfer | None) -> str:
    assert transfer is not None, "what is not only validated is a transfer"
    return transfer.id


def _loss(transfer: Transfer) -> Loss:
    why = transfer.failure
    assert why is not None, "what is over without success says why"
    return Loss(why.reason, why.message, why.next or NextStep.RECOMPUTE, why.phase, why.side, why.rank)
