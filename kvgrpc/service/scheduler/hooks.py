"""The shell round the policy: a scheduler's hooks in, transfers and news out. All rules are the policy's.

What the policy wants done is asked of the node with the events that HandoffService makes of its calls, as the same
caller, so that transfers, leases and blocks are treated the same. How they fare is heard from the runner. The node
answers before `Runner.submit` returns, because no hook is called while it is busy: a hook that returns has been done.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kvgrpc.core import actions, events
from kvgrpc.core.actions import Reply
from kvgrpc.core.moves.failures import NEXT_STEPS
from kvgrpc.core.policy.policy import Policy
from kvgrpc.core.policy.request import prefills, without_backoff
from kvgrpc.core.policy.values import (
    Admitted,
    Arrival,
    Begin,
    Cancel,
    Finished,
    GiveUp,
    HandOver,
    Loss,
    Match,
    Mode,
    Outcome,
    Part,
    Provisional,
    Reserve,
    ReservedAt,
    Side,
    Start,
    StartOver,
    Table,
    Take,
    Task,
)
from kvgrpc.core.tables.transfers import Next, State, Transfer
from kvgrpc.core.values import content as contents
from kvgrpc.core.values.ids import ACCESS_ID_BYTES
from kvgrpc.core.values.limits import granted_ttl
from kvgrpc.errors import Exhausted, KVGrpcError, Reason
from kvgrpc.service.lead import ANONYMOUS, Lead
from kvgrpc.service.rpc.handoff import check_dial
from kvgrpc.service.scheduler.news import NEWS_MAX, NewsLog
from kvgrpc.service.session.calls import sentence
from kvgrpc.wire.scheduler import Named, Offer, Wanted, block_ids

_Event = events.PullBlocks | events.GiveDestination | events.ReserveBlocks | events.FinishedBlocks


@dataclass(eq=False)
class _Request:
    """One request with what its transfers need."""

    wanted: Wanted
    given: contents.Content | None = None
    """What the KV is of that goes."""
    transfers: dict[Side, str] = field(default_factory=dict)
    grant: bytes = b""
    """The READ grant of what was handed over."""
    lease_id: str = ""
    """Of the parts of a push, in this epoch."""
    part_epoch: int = 0
    provisional: Provisional | None = None
    """As last told."""

    @property
    def id(self) -> str:
        return self.wanted.request_id


class Scheduling:
    """The scheduler of this server's engine."""

    def __init__(self, lead: Lead) -> None:
        self._lead = lead
        self._runner = lead.runner
        self.news = NewsLog()
        self._perform: dict[type[Task], Callable[[_Request, Any], None]] = {
            Begin: self._begin_pull,
            Start: self._start,
            Reserve: self._reserve,
            HandOver: self._hand_over,
            Part: self._part,
            StartOver: self._start_over,
            GiveUp: self._give_up,
            Cancel: self._cancel,
        }
        self._begin()
        lead.runner.on_transfer.append(self._changed)
        lead.runner.on_life.append(self._begin)

    # -- hooks: see Policy

    def arrived(self, wanted: Wanted) -> Admitted:
        """Raises what `Policy.arrived` raises, and for what the node would not take. Then nothing has changed."""
        arrival = self._arrival(wanted)
        admitted = self.policy.admits(arrival)
        if wanted.request_id not in self.policy:
            request = _Request(wanted)
            self._check(request, arrival)
            self._known[request.id] = request
        self.policy.arrived(arrival)
        self._settle(wanted.request_id)
        return admitted

    def match(self, request_id: str, computed_tokens: int) -> Match:
        return self.policy.match(request_id, computed_tokens)

    def allocated(self, request_id: str, table: Table, computed: int, external: int, after_step: int) -> None:
        self.policy.allocated(request_id, table, computed, external, after_step)
        self._settle(request_id)

    def computed(self, request_id: str, table: Table, computed: int, step: int) -> None:
        """Raises Exhausted (LIMIT_EXCEEDED) where what is to be saved finds no place among the news."""
        if self.policy.rules.staged:
            self._check_news()
        self.policy.computed(request_id, table, computed, step)
        self._settle(request_id)

    def loaded(self, request_id: str) -> None:
        self.policy.loaded(request_id)
        self._settle(request_id)

    def preempted(self, request_id: str) -> None:
        self.policy.preempted(request_id)
        self._settle(request_id)

    def finished(
        self, request_id: str, named: Named | None, table: Table, computed: int, outcome: Outcome, step: int
    ) -> tuple[Finished, bytes]:
        """With the READ grant, if there is one. `named`: what prompt and answer are; None: the prompt is all.

        Raises OutOfRange (CONTENT_RANGE) when nothing names the tokens that are handed over.
        """
        request = self._known.get(request_id)
        if request is None:
            return self.policy.finished(request_id, table, computed, outcome, step), b""
        tokens = self.policy.given_tokens(request_id, computed, outcome)
        if tokens and request.given is None:
            names = named or request.wanted.prompt
            assert names is not None, "who has no tokens gives nothing"
            given = names.first(tokens)
        else:
            given = None
        finished = self.policy.finished(request_id, table, computed, outcome, step)
        request.given = request.given or given
        self._settle(request_id)
        handed_over = finished.handed_over and bool(request.grant or request.lease_id)  # it may have been refused
        return replace(finished, handed_over=handed_over), request.grant

    def aborted(self, request_id: str, message: str) -> Finished:
        finished = self.policy.aborted(request_id, message or "aborted")
        self._settle(request_id)
        return finished

    # -- what is checked of a request before it is known

    def _arrival(self, wanted: Wanted) -> Arrival:
        tokens = wanted.prompt_tokens
        take = None
        if isinstance(wanted.take, Offer):
            take = Take(Mode.PULL, wanted.take.claims.token_count)
        elif wanted.take is not None:
            take = Take(Mode.PUSH, without_backoff(self.policy.rules, tokens), wanted.take.keep)
        chain = wanted.prompt is not None and wanted.prompt.tokens is None
        return Arrival(wanted.request_id, tokens, take, wanted.give, wanted.needs_all_outputs, chain, wanted)

    def _check(self, request: _Request, arrival: Arrival) -> None:
        """Raises, or has registered the push of a target that was brought."""
        wanted, state = request.wanted, self._lead.node.state
        state.pool  # noqa: B018 - raises where there is none
        for address in wanted.addresses:
            check_dial(self._lead, address)
        granted_ttl(wanted.ttl_s, state.limits)
        if arrival.take is not None or arrival.give is not None:
            state.check_open()
        self._check_news()
        if arrival.give is None or arrival.give.mode is not Mode.PUSH or wanted.prompt is None:
            return
        if prefills(arrival):
            request.given = wanted.prompt.first(without_backoff(self.policy.rules, arrival.prompt_tokens))
        if wanted.target:
            self._register(request)

    def _check_news(self) -> None:
        if len(self.news) >= NEWS_MAX:
            text = f"{len(self.news)} news were not read: say up to which number you have them"
            raise Exhausted(Reason.LIMIT_EXCEEDED, text, retry_delay_s=1.0)

    def _register(self, request: _Request) -> None:
        refused: list[KVGrpcError] = []

        def answered(reply: Reply | KVGrpcError) -> None:
            if isinstance(reply, KVGrpcError):
                refused.append(reply)
            else:
                assert isinstance(reply.answer, actions.Registered)
                self._follow(request, Side.GIVE, reply.answer.transfer)

        call = self._call(request)
        ids = os.urandom(ACCESS_ID_BYTES), os.urandom(ACCESS_ID_BYTES)
        event = events.RegisterPush(call, request.wanted.target, request.wanted.label, *ids)
        self._runner.submit(call.id, event, answered)
        if refused:
            raise refused[0]

    # -- tasks

    def _settle(self, request_id: str) -> None:
        """Performs what the policy decided of a request."""
        request = self._known.get(request_id)
        for task in self.policy.take_tasks():  # also of one that is forgotten meanwhile
            assert request is not None
            assert task.request_id == request_id
            self._perform[type(task)](request, task)
        self._tell()
        self._forget(request_id)

    def _tell(self) -> None:
        for told in self.policy.take_told():
            self.news.add(told)
            self._forget(told.request_id)

    def _forget(self, request_id: str) -> None:
        if request_id not in self.policy:
            self._known.pop(request_id, None)

    def _call(self, request: _Request) -> events.Call:
        return events.Call(self._runner.next_call_id(), ANONYMOUS, request.wanted.trace)

    def _ask(self, request: _Request, side: Side, event: _Event, answered: Callable[[Any], None] | None = None) -> None:
        """What cannot even be asked for is a loss like any other."""

        def hear(reply: Reply | KVGrpcError) -> None:
            if isinstance(reply, KVGrpcError):
                self._refused(request, side, reply)
                return
            if answered is not None:
                answered(reply.answer)
            self._follow(request, side, getattr(reply.answer, "transfer", None))

        self._runner.submit(event.call.id, event, hear)

    def _refused(self, request: _Request, side: Side, error: KVGrpcError) -> None:
        loss = Loss(error.reason, sentence(error), NEXT_STEPS.get(error.reason, Next.RECOMPUTE))
        self.policy.failed(request.id, side, loss)
        if request.transfers.get(side) in self._of:
            self._end(request, side, loss.message)
        else:
            self.policy.returned(request.id, side)
        self._tell()

    def _begin_pull(self, request: _Request, task: Begin) -> None:
        wanted = request.wanted
        assert isinstance(wanted.take, Offer)
        assert wanted.prompt is not None
        use = task.use_tokens
        event = events.PullBlocks(
            self._call(request), wanted.take.token, wanted.prompt.with_digest(use or wanted.take.claims.token_count),
            os.urandom(ACCESS_ID_BYTES), use, request_id=wanted.label, priority=wanted.priority,
        )  # fmt: skip
        self._ask(request, Side.TAKE, event)

    def _start(self, request: _Request, task: Start) -> None:
        transfer_id = request.transfers.get(Side.TAKE)
        if transfer_id in self._of:
            destination = events.Destination(block_ids(task.blocks), task.have_tokens)
            event = events.GiveDestination(self._call(request), transfer_id, destination, task.after_step)
            self._ask(request, Side.TAKE, event)

    def _reserve(self, request: _Request, task: Reserve) -> None:
        wanted = request.wanted
        assert wanted.prompt is not None
        assert wanted.take is not None
        assert not isinstance(wanted.take, Offer)
        source = wanted.take.source

        def reserved(answer: actions.Reserved) -> None:
            if source is None:
                self.news.add(ReservedAt(request.id, answer.token))

        event = events.ReserveBlocks(
            self._call(request), wanted.key, block_ids(task.blocks), wanted.prompt.beginning(task.use_tokens),
            task.have_tokens, task.use_tokens, source, wanted.label, wanted.priority, task.after_step,
        )  # fmt: skip
        self._ask(request, Side.TAKE, event, reserved)

    def _hand_over(self, request: _Request, task: HandOver) -> None:
        wanted = request.wanted

        def handed_over(answer: actions.HandedOver) -> None:
            request.grant = answer.token

        event = events.FinishedBlocks(
            self._call(request), wanted.key, block_ids(task.blocks), request.given, wanted.ttl_s, wanted.consumers,
            wanted.on_abort, wanted.label, wanted.priority, task.after_step,
        )  # fmt: skip
        self._ask(request, Side.GIVE, event, handed_over)

    def _part(self, request: _Request, task: Part) -> None:
        wanted = request.wanted

        def taken(answer: actions.HandedOver) -> None:
            request.lease_id = answer.lease.id

        event = events.FinishedBlocks(
            self._call(request), wanted.key, block_ids(task.blocks), request.given, None, wanted.consumers,
            wanted.on_abort, wanted.label, wanted.priority, task.after_step, request.lease_id,
            waits_for=events.WaitsFor.REGISTRATION, last=task.last, layers=task.layers, part_epoch=request.part_epoch,
        )  # fmt: skip
        self._ask(request, Side.GIVE, event, taken)

    def _start_over(self, request: _Request, _: StartOver) -> None:
        """Its blocks are taken back as an engine does it that has a void page: nobody is vouched for from here on."""
        if request.lease_id:
            self._runner.feed(events.LeasesVoided((request.lease_id,)))
            request.part_epoch += 1
            request.lease_id = ""

    def _give_up(self, request: _Request, task: GiveUp) -> None:
        event = events.FinishedBlocks(
            self._call(request), request.wanted.key, (), None, waits_for=events.WaitsFor.REGISTRATION,
            failure=task.message or "the source cannot deliver",
        )  # fmt: skip
        self._ask(request, Side.GIVE, event)

    def _cancel(self, request: _Request, task: Cancel) -> None:
        if request.transfers.get(task.side) in self._of:
            self._end(request, task.side, task.message)

    def _end(self, request: _Request, side: Side, message: str) -> None:
        """Cancels a transfer; what comes of it is told by its changes."""
        call = self._call(request)
        event = events.CancelTransfer(call, request.transfers[side], message=message)
        self._runner.submit(call.id, event, lambda _: None)

    # -- how transfers fare

    def _follow(self, request: _Request, side: Side, transfer: Transfer | None) -> None:
        """A transfer was made for a request. What became of it since, in the same event, was not heard."""
        if transfer is None:
            return
        request.transfers[side] = transfer.id
        self._of[transfer.id] = request, side
        now = self._lead.node.state.transfers.find(transfer.id)
        self._changed(now or transfer)

    def _changed(self, transfer: Transfer) -> None:
        request, side = self._of.get(transfer.id, (None, Side.TAKE))
        if request is None:
            return
        if transfer.settled:
            del self._of[transfer.id]
        if self._known.get(request.id) is request:
            self._hear(request, side, transfer)
            self._tell()
            self._forget(request.id)

    def _hear(self, request: _Request, side: Side, transfer: Transfer) -> None:
        succeeded = transfer.state is State.SUCCEEDED
        if not transfer.over and side is Side.TAKE:
            provisional = Provisional(request.id, transfer.layers_done, transfer.part_epoch)
            if provisional != request.provisional and (provisional.layers_done or request.provisional):
                request.provisional = provisional
                self.news.add(provisional)
        if transfer.over and not succeeded:
            self.policy.failed(request.id, side, _loss(transfer))
        if transfer.settled and succeeded and side is Side.TAKE:
            self.policy.received(request.id)
        elif transfer.settled:
            self.policy.returned(request.id, side)

    def _begin(self) -> None:
        """A new life of the engine, which knows of no request."""
        description = self._lead.node.state.description
        self.policy = Policy(self._lead.config.scheduler.rules(description.pool.groups if description else ()))
        self._known: dict[str, _Request] = {}
        self._of: dict[str, tuple[_Request, Side]] = {}
        self.news.begin()


def _loss(transfer: Transfer) -> Loss:
    why = transfer.failure
    assert why is not None, "what is over without success says why"
    return Loss(why.reason, why.message, why.next or Next.RECOMPUTE, why.phase, why.side, why.rank)
