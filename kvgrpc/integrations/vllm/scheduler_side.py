"""The scheduler's side of an engine that moves blocks: vLLM's hooks, on a Scheduler with a lead of its own. Whatever
becomes of kvgrpc, every request that waits for KV hears of it exactly once, and every block that was handed over comes
back exactly once.

A hook that fails ends kvgrpc in this engine. The lead is ended then, so that peers use nothing of what they still read.
Blocks that were being filled stay out of use, since something may still write into them.
"""

import logging
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvgrpc.core.policy.values import Admitted, LoadEnded, ModeChoice, News, OnLoss, Outcome, SendEnded, TakeLost
from kvgrpc.core.values.layout import GroupKind, PoolLayout
from kvgrpc.engine import Engine, LeadDied
from kvgrpc.engine.scheduler import ScheduledRequest, Scheduler
from kvgrpc.errors import AlreadyExists, InvalidRequest, KVGrpcError, PreconditionFailed, Reason
from kvgrpc.integrations import params as of_routers
from kvgrpc.integrations.vllm import prompts
from kvgrpc.integrations.vllm.adapters import Adapters
from kvgrpc.integrations.vllm.block_tables import blocks_of, without_null
from kvgrpc.integrations.vllm.geometry import fits_part
from kvgrpc.integrations.vllm.meeting import BlockStep
from kvgrpc.integrations.vllm.options import BlockOptions
from kvgrpc.integrations.vllm.pressure import Pressure
from kvgrpc.integrations.vllm.siblings import Siblings
from kvgrpc.integrations.vllm.stats import KVGrpcStats
from kvgrpc.integrations.vllm.waking import HeldBlocks

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)

IDLE_S = 0.002
"""Time that a step without tokens waits for news, in seconds: vLLM steps on while a request waits for KV."""
LOOK_S = 0.1
"""Interval at which steps look for the death of an idle lead, in seconds: a look costs as much as all else."""
RESET_S = 5.0
"""Maximum time that a reset waits until old blocks are neither read nor filled, in seconds; without readers 1 ms."""


@dataclass(eq=False)
class _Served:
    """A request that is served here, until it left."""

    offer: ScheduledRequest | None
    """What it offers for the next turn, once it has answered; None: nothing."""
    here: int = 0
    """Tokens found here at the last `match`; vLLM's own count changes between that and `allocated`."""


class SchedulerSide:
    """The scheduler's side of one engine. A hook that raises is called again after `end`."""

    def __init__(
        self, engine: Engine, options: BlockOptions, layout: PoolLayout, blocks: Any, *, overlap: bool, alone: bool
    ) -> None:
        """`blocks`: the KVCacheManager of vLLM. `overlap`: hooks may be called while a step runs on the workers.
        `alone`: this is the engine's one connector, which has told vLLM what becomes of loads that fail.
        """
        self.stats, self.adapters, self.address = KVGrpcStats(), Adapters(), engine.address
        self.engine, self._options, self._blocks = engine, options, blocks
        self._overlap, self._alone, self._over, self._number = overlap, alone, False, 0
        self._asking: set[str] = set()
        """Requests that ask for KV to move, until vLLM says that they left."""
        self._wanting: dict[str, bool] = {}
        """Requests that were prefilled elsewhere, until they have blocks -> whether they want in vain."""
        self._serving: dict[str, _Served] = {}
        """Requests of vLLM that are served here. Another request may already have the id of one that has left."""
        self._computing: dict[str, Request] = {}
        """Requests that are to be pushed, or may be, while they are computed."""
        self._loading: dict[str, tuple[Request, list[int], int]] = {}
        """Requests that wait for KV, each with the blocks for it, and the number of its tokens found here."""
        self._failed: set[str] = set()
        """Requests of `_loading` that wait in vain."""
        self._left: set[str] = set()
        """Requests that left since the last step. Another request may have the id already."""
        self.held = HeldBlocks(engine, blocks)
        self._siblings = Siblings()
        self._keys = of_routers.RecentKeys()
        self._look_at = 0.0
        """Time at which a step looks whether an idle lead is still there."""
        self._states = any(group.kind is GroupKind.STATE for group in layout.groups)
        self.scheduler = Scheduler(engine, options.rules(layout), moved=self.stats.moved, takes_parts=fits_part(layout))
        self.pressure = Pressure(self.scheduler, layout.groups, options.step_tokens)

    # -- requests

    def arrived(self, request: "Request") -> None:
        """Takes a request that arrived, and begins what its params ask for."""
        request_id, params = request.request_id, request.kv_transfer_params
        self.pressure.arrived(request)
        if asked := of_routers.asked_of(params):
            self._asking.add(request_id)
        if of_routers.PREFILLED_ELSEWHERE in asked:
            self._wanting[request_id] = self._over
        try:
            if isinstance(params, dict) and not self._over:
                self._begin(request, params)
        except LeadDied:
            raise
        except KVGrpcError as error:
            if request.abort_immediately:  # it names nothing that could be freed, and was counted if it came before
                return
            if request_id in self._wanting:
                self._wanting[request_id] = True
            self.stats.refused(str(error))
            _log.warning("request %s moves no KV: %s", request_id, error)

    def _begin(self, request: "Request", params: dict[str, Any]) -> None:
        """Raises KVGrpcError if these params ask in vain."""
        request_id, sampling = request.request_id, request.sampling_params
        found = of_routers.wanted(
            request_id, prompts.named_prompt(request), params, self._options.defaults,
            cache_salt=request.cache_salt or "", items=prompts.items_of(request),
            needs_all_outputs=sampling is not None and sampling.prompt_logprobs is not None,
            arrived_us=prompts.arrived_us(request), used_keys=self._keys, traceparent=prompts.trace_of(request, params),
        )  # fmt: skip
        if found is None:
            return
        if request.abort_immediately:  # vLLM's API refused it, and shows it without its prompt
            self.scheduler.let_go(found, "its engine's API refused the request")
            self.engine.flush()
            return
        found, admitted = self._admit(request, found)
        offer = None if prompts.is_streamed(request) else of_routers.offered(found, self._options.defaults)
        self._serving[request_id] = _Served(offer)
        self.pressure.began(request_id, found.request_time_us)
        if self._overlap:
            self.engine.flush()  # otherwise the next step sends it, and a pull with its blocks in one call
        if found.give is not None and found.give.prefill:
            request.max_tokens = 1
            prompts.shorten(request, admitted.prompt_tokens)
            if found.give.mode is not ModeChoice.PULL:
                self._computing[request_id] = request

    def _admit(self, request: "Request", found: ScheduledRequest) -> tuple[ScheduledRequest, Admitted]:
        """Lets a request in, under its adapter's name; returns it, and how it is computed. Raises KVGrpcError for a
        request that has no name, or is one too many; then the destination that waits for its push has been told.
        """
        try:
            pushes = found.give is not None and found.give.mode is ModeChoice.PUSH
            if not found.prompt and (found.take is not None or pushes):
                raise InvalidRequest(Reason.CONTENT_REQUIRED, "its prompt is more than token ids, and has no name")
            if request.request_id in self.scheduler.policy:  # vLLM tells of each request once
                what = "blocks of an earlier request of this id are still given or filled"
                raise AlreadyExists(Reason.TRANSFER_EXISTS, what)
            adapter, cached = self.adapters.name(request.lora_request), self._blocks.block_pool.enable_caching
            named = self._siblings.share(replace(found, adapter=adapter), cached=cached)
            admitted = self.scheduler.arrived(named)
            if found.give is not None:
                self._keys.add(found.transfer_key)
        except LeadDied:
            raise
        except KVGrpcError as error:
            self._siblings.forget(request.request_id)
            self.scheduler.refused(found, error.sentence)
            self.engine.flush()
            raise
        return named, admitted

    def match(self, request: "Request", computed_tokens: int) -> tuple[int | None, bool]:
        """Returns the tokens that come from elsewhere, and whether there are any; None: vLLM asks again. KV that should
        come, and will not, is announced as a load that fails, if that is configured: it is vLLM's own way to say so.
        """
        request_id = request.request_id
        tokens: int | None = 0
        if (served := self._serving.get(request_id)) is not None and not self._over:
            served.here = computed_tokens
            waits = self._siblings.waits(request_id)
            tokens = None if waits else self.scheduler.match(request_id, computed_tokens).tokens
        if tokens is None:
            return None, False
        self.pressure.asked_for(request, computed_tokens)
        if self._wanting.get(request_id) and self._options.on_loss is OnLoss.FAIL:
            tokens = max(0, int(request.num_tokens) - computed_tokens)
        return tokens, bool(tokens)

    def allocated(self, request: "Request", table: tuple[list[int], ...], external_tokens: int) -> None:
        """Takes a request's blocks. The second call for a request has no tokens to come."""
        request_id, known = request.request_id, False
        self.pressure.placed(request_id)
        in_vain, served = self._wanting.pop(request_id, False), self._serving.get(request_id)
        here = 0 if served is None else served.here
        if external_tokens:
            self._loading[request_id] = request, blocks_of(table), here
        if served is not None and not (in_vain or self._over):
            served.here = 0
            try:
                self.scheduler.allocated(request_id, without_null(table), here, external_tokens, self._behind())
                known = request_id in self.scheduler.policy
            except (InvalidRequest, PreconditionFailed) as error:
                _log.error("request %s gets no KV: %s", request_id, error)
        if external_tokens and known:
            self.stats.waits(request_id)
        elif external_tokens:
            self._failed.add(request_id)

    def finished(self, request: "Request", table: tuple[list[int], ...]) -> dict[str, Any] | None:
        """Ends a request that left. Returns what the router relays to the next engine; None: nothing. vLLM keeps blocks
        that are still being filled until the load is reported.
        """
        request_id, answer = request.request_id, None
        self.pressure.left(request_id)
        self._left.add(request_id)
        served = self._forget(request_id)
        if self._over:
            return None
        if served is not None and request_id in self.scheduler.policy:
            keep, answer = self._hand_over(request, table, served.offer)
            if keep and request_id not in self._loading:
                self.held.hold(request_id, blocks_of(table))
        return self._siblings.left(request, answer)

    def _forget(self, request_id: str) -> _Served | None:
        self._asking.discard(request_id)
        self._wanting.pop(request_id, None)
        self._computing.pop(request_id, None)
        return self._serving.pop(request_id, None)

    def _hand_over(
        self, request: "Request", table: tuple[list[int], ...], offer: ScheduledRequest | None
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hands over what a request that left gives. Returns whether to hold blocks, and what the router relays."""
        request_id = request.request_id
        complete = request.status in prompts.COMPLETE and not self._siblings.is_silent(request_id)
        if self._states and request.num_output_placeholders:
            complete = False  # steps in flight change its state, which is then of more tokens than it has
        outcome = Outcome.COMPLETE if complete else Outcome.ABORTED
        left = list(request.all_token_ids), without_null(table), request.num_computed_tokens, outcome, self._behind()
        try:
            self.adapters.name(request.lora_request)
            found = self.scheduler.finished(request_id, *left)
            if offer is not None and complete and not found.keep:
                self.scheduler.arrived(offer)
                found = self.scheduler.finished(request_id, *left)
        except LeadDied:
            raise
        except KVGrpcError as error:
            _log.error("the KV of request %s goes nowhere: %s", request_id, error)
            found = self.scheduler.aborted(request_id, error.sentence)
        self.engine.flush()
        return found.keep, self._answer(request) if found.handed_over else None

    def _answer(self, request: "Request") -> dict[str, Any] | None:
        """Returns what the router relays of a request that left; None: nothing was handed over."""
        params, tokens = request.kv_transfer_params, request.num_computed_tokens
        trace = prompts.trace_of(request, params)
        if grant := self.scheduler.grant(request.request_id):
            prefilled = params.get(of_routers.PREFILLED_HERE) is True
            return of_routers.answered(grant, prefilled=prefilled, traceparent=trace)
        if key := self.scheduler.push_key(request.request_id):
            return of_routers.answered_push(key, self.engine.engine_id, self.address, tokens, trace)
        return None

    def _behind(self) -> int:
        """Returns the step after which blocks move that vLLM allocated or finished with; 0: no step runs."""
        return self._number if self._overlap else 0

    # -- steps

    def step(self, output: "SchedulerOutput") -> BlockStep:
        """Returns what the worker is to report, with what vLLM is to know."""
        self._hear_of(output)
        step = BlockStep() if self._over else self._go_on(output)
        step.loaded |= self._failed
        step.failed |= self._failed
        self._failed.clear()
        # Each is reported once: a second report, or one of a request that does not wait, ends the engine.
        step.loaded &= self._loading.keys()
        step.failed &= step.loaded
        if self._options.on_loss is OnLoss.RECOMPUTE and not self._alone:
            step.failed -= {id_ for id_ in step.failed if prompts.begin_anew(self._loading[id_][0], self._blocks)}
        for request_id in step.loaded:
            del self._loading[request_id]
        self.held.release(step.sent, over=self._over)
        return step

    def _hear_of(self, output: "SchedulerOutput") -> None:
        """Finds requests that vLLM ended or computed without a call of this connector's hooks: they move nothing, and
        peers that wait are told.
        """
        ended = self._asking & (set(output.finished_req_ids) - self._left)
        self._left.clear()
        for hook, request_ids in (
            ("request_finished_all_groups or request_finished", ended),
            ("update_state_after_alloc", self._wanting.keys() & output.num_scheduled_tokens.keys()),
        ):
            why = f"vLLM does not call {hook} of this connector"
            for request_id in request_ids:
                self._forget(request_id)
                if not self._over:
                    self._siblings.forget(request_id)
                    self.scheduler.aborted(request_id, why)
                    self.stats.unheard(why)

    def _go_on(self, output: "SchedulerOutput") -> BlockStep:
        """Lets what is scheduled go once it is computed. Returns the message to the worker, with what came."""
        self._number += 1
        self._siblings.go_on(output.num_scheduled_tokens)
        for request_id in self._serving.keys() & (output.preempted_req_ids or ()):
            self.scheduler.preempted(request_id)
        for request_id, request in self._computing.items():
            count = output.num_scheduled_tokens.get(request_id)
            if count and self.scheduler.policy.pushes(request_id):
                table = without_null(self._blocks.get_block_ids(request_id))
                self.scheduler.computed(request_id, table, request.num_computed_tokens + count, self._number)
        if self.held:
            self.pressure.relieve(output, self._blocks.block_pool)
        step = BlockStep(self._number, report=self._overlap or any(map(self.scheduler.policy.pushes, self._computing)))
        idle = self._loading and not output.total_num_scheduled_tokens
        now = time.monotonic()
        if self._loading or self.scheduler.busy or now >= self._look_at:
            self._look_at = now + LOOK_S
            self._hear(self.scheduler.step(IDLE_S if idle else 0.0), step)
        return step

    def _hear(self, told: list[News], step: BlockStep) -> None:
        """Puts what vLLM is to know of the news into `step`."""
        for news in told:
            match news:
                case LoadEnded():
                    step.loaded.add(news.request_id)
                    self.stats.waited(news.request_id)
                    request, _, here = self._loading[news.request_id]
                    if (loss := news.loss) is None:
                        self.stats.received(news.tokens - here)
                        if news.tokens < request.num_computed_tokens:
                            prompts.reached(request, here, news.tokens)
                    else:
                        self.stats.lost(loss)
                        step.failed.add(news.request_id)
                        _log.warning("request %s got no KV: %s: %s", news.request_id, loss.reason, loss.message)
                case SendEnded():
                    step.sent.add(news.request_id)
                    self.stats.sent(news)
                case TakeLost(loss=loss):
                    if news.on_loss is OnLoss.RECOMPUTE:  # otherwise a load fails, and is counted then
                        self.stats.lost(loss)
                    _log.warning("request %s gets no KV: %s: %s", news.request_id, loss.reason, loss.message)

    def hear(self, _: object) -> None:
        """Does nothing: workers report to the lead."""

    # -- the engine

    @property
    def has_news(self) -> bool:
        """True if an engine without requests has a step to make: blocks may have come back."""
        return bool(self.held) and (self._over or self.engine.due())

    def reset(self) -> bool:
        """Drops what was computed before, for example with old weights: on return nothing of it is offered, and nothing
        that was to come is used. Returns False if some is, or if its blocks are still being read or filled.
        """
        self._wanting = dict.fromkeys(self._wanting, True)
        step = BlockStep()
        done = self._over or self._end_all(step)
        self._failed |= step.loaded & self._loading.keys()
        self.held.release(step.sent, over=self._over)
        return done

    def _end_all(self, step: BlockStep) -> bool:
        """Ends all that is given, or comes, and puts what vLLM is to know into `step`. Returns False if some blocks are
        still being read or filled, and come back later.
        """
        self.scheduler.abort_all("the engine's cache was reset")
        self._computing.clear()
        for served in self._serving.values():
            served.offer = None
        deadline = time.monotonic() + RESET_S
        while self.scheduler.policy and (left_s := deadline - time.monotonic()) > 0:
            self._hear(self.scheduler.step(left_s), step)
        self.engine.flush()
        return not self.scheduler.policy

    def close(self) -> None:
        """Ends kvgrpc, as the engine ends."""
        self._over = True
        self.held.close()
        self.engine.close()

    def end(self, _: str) -> None:
        """Ends kvgrpc in this engine at once. Idempotent."""
        if self._over:
            return
        self._over = True
        self._wanting = dict.fromkeys(self._wanting, True)
        self._failed |= self._loading.keys()
        filled = [block for _, blocks, _ in self._loading.values() for block in blocks]
        for ending in (self.held.close, self.engine.abandon, partial(self.held.keep, filled)):
            try:
                ending()
            except Exception:  # noqa: BLE001 - logged: the engine goes on without kvgrpc
                _log.exception("kvgrpc did not end in order")
