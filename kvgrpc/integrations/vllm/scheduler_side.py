"""The connector in vLLM's engine core: its hooks, on a Scheduler with a lead of its own."""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgrpc.core.policy.values import (
    Admitted,
    Give,
    LoadEnded,
    Loss,
    ModeChoice,
    News,
    OnLoss,
    Outcome,
    Rules,
    SendEnded,
    TakeLost,
)
from kvgrpc.core.values.ids import TRANSFER_KEY_BYTES_MIN
from kvgrpc.core.values.layout import GroupKind, PoolLayout
from kvgrpc.engine import Engine, LeadDied
from kvgrpc.engine.scheduler import ScheduledRequest, Scheduler
from kvgrpc.errors import AlreadyExists, InvalidRequest, KVGrpcError, PreconditionFailed, Reason
from kvgrpc.integrations.params import RecentKeys, answered, answered_push, offered, wanted
from kvgrpc.integrations.vllm.adapters import Adapters
from kvgrpc.integrations.vllm.block_tables import without_null
from kvgrpc.integrations.vllm.geometry import fits_part
from kvgrpc.integrations.vllm.meeting import MEET_S, MIRROR_S, BlockStep, give_tickets
from kvgrpc.integrations.vllm.options import BlockOptions
from kvgrpc.integrations.vllm.pressure import Pressure
from kvgrpc.integrations.vllm.prompts import (
    COMPLETE,
    arrived_us,
    is_streamed,
    items_of,
    named_prompt,
    reached,
    shorten,
    trace_of,
)
from kvgrpc.integrations.vllm.siblings import Siblings
from kvgrpc.integrations.vllm.stats import KVGrpcStats

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


class SchedulerSide:
    """The scheduler's side of one engine's connector."""

    def __init__(
        self, engine_id: str, options: BlockOptions, layout: PoolLayout, revision: str, *, overlap: bool, ranks: int = 1
    ) -> None:
        """`overlap`: hooks may be called while a step runs on the workers. Each of the `ranks` has a worker."""
        self.stats = KVGrpcStats()
        self.adapters = Adapters()
        self.blocks: Any = None
        """The KVCacheManager of vLLM."""
        self._options = options
        self._overlap = overlap
        self._number = 0
        self._computing: dict[str, Request] = {}
        """Requests that are to be pushed, or may be, while they are computed."""
        self._siblings = Siblings()
        self._unshown: set[str] = set()
        """Prefills that give nothing, since another one gives what they compute."""
        self._computed_tokens: dict[str, int] = {}
        """Tokens found here at the last `match`; vLLM's own count changes between that and `allocated`."""
        self._waiting: dict[str, tuple[Request, int]] = {}
        """Requests that wait for their KV, with the number of their tokens found here."""
        self._known: set[str] = set()
        """Requests that are not over for kvgrpc."""
        self._serving: set[str] = set()
        """Requests of vLLM that are served here. Another request may already have the id of one that has left."""
        self._keys = RecentKeys()
        self._look_at = 0.0
        """Time at which a step looks whether an idle lead is still there."""
        self._offers: dict[str, ScheduledRequest] = {}
        """Offers for the next turn of requests that decode here, once they have answered."""
        count, layers = options.layers_per_part, max(group.layers for group in layout.groups)
        ranges = tuple((first, min(count, layers - first)) for first in range(0, layers, count)) if count else ()
        named = ("--engine-id", engine_id) if engine_id else ()  # from its start on, for its traces
        self._engine = Engine.launch(
            listen=options.listen, flags=(*named, *options.lead_flags), pool=layout,
            private_memory=not options.mirror, mirrored=options.mirror, weights_revision=revision, engine_id=engine_id,
            world_size=ranks, expects_pushes=True,
        )  # fmt: skip
        self._states = any(group.kind is GroupKind.STATE for group in layout.groups)
        rules = Rules(
            (), options.on_loss, options.recompute_threshold_tokens, backoff_tokens=int(self._states),
            layer_ranges=ranges,
        )  # fmt: skip
        self.scheduler = Scheduler(self._engine, rules, moved=self.stats.moved, takes_parts=fits_part(layout))
        self.pressure = Pressure(self.scheduler, layout.groups, options.step_tokens)
        _log.info("kvgrpc: engine %s serves at %s", self._engine.engine_id, self._engine.address)

    @property
    def lead_pid(self) -> int:
        return self._engine.lead_pid

    @property
    def has_news(self) -> bool:
        """True if a step would hear something."""
        return self._engine.due()

    def fileno(self) -> int:
        """See `Engine.fileno`."""
        return self._engine.fileno()

    @property
    def lead_gone(self) -> bool:
        """See `Engine.lead_gone`."""
        return self._engine.lead_gone

    @property
    def address(self) -> str:
        """Address at which the lead serves."""
        return self._engine.address

    def meet(self, ranks: Sequence[tuple[Path, Sequence[int]]]) -> None:
        """See `give_tickets`."""
        give_tickets(self._engine.ticket, ranks, MIRROR_S if self._options.mirror else MEET_S)

    def arrived(self, request: "Request", params: dict[str, Any]) -> bool:
        """Begins what a request's params ask for. Returns False if they ask in vain."""
        logprobs = request.sampling_params is not None and request.sampling_params.prompt_logprobs is not None
        try:
            found = wanted(
                request.request_id, named_prompt(request), params, self._options.defaults,
                cache_salt=request.cache_salt or "", items=items_of(request), needs_all_outputs=logprobs,
                arrived_us=arrived_us(request), used_keys=self._keys, traceparent=trace_of(request, params),
            )  # fmt: skip
            if found is None:
                return True
            if request.abort_immediately:  # vLLM's API refused it, and shows it without its prompt
                self.scheduler.let_go(found, "its engine's API refused the request")
                self._engine.flush()
                return True
            found, admitted = self._admit(request, found)
        except LeadDied:
            raise
        except KVGrpcError as error:
            if request.abort_immediately:  # it names nothing that could be freed, and was counted if it came before
                return True
            self.stats.refused(str(error))
            _log.warning("request %s moves no KV: %s", request.request_id, error)
            return False
        self._known.add(request.request_id)
        self._serving.add(request.request_id)
        self.pressure.began(request.request_id, found.request_time_us)
        if not is_streamed(request) and (offer := offered(found, self._options.defaults)) is not None:
            self._offers[request.request_id] = offer
        if self._overlap:
            self._engine.flush()  # otherwise the next step sends it, and a pull with its blocks in one call
        if found.give is not None and found.give.prefill:
            request.max_tokens = 1
            shorten(request, admitted.prompt_tokens)
            if found.give.mode is not ModeChoice.PULL:
                self._computing[request.request_id] = request
        return True

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
            named = self._shared(replace(found, adapter=self.adapters.name(request.lora_request)))
            admitted = self.scheduler.arrived(named)
            if found.give is not None:
                self._keys.add(found.transfer_key)
        except LeadDied:
            raise
        except KVGrpcError as error:
            self._siblings.left(request.request_id)
            self._unshown.discard(request.request_id)
            self.scheduler.refused(found, error.sentence)
            self._engine.flush()
            raise
        return named, admitted

    def _shared(self, found: ScheduledRequest) -> ScheduledRequest:
        """Returns what one sibling gives and takes of what the original request wants."""
        if found.give is not None and not self._siblings.gives(found.request_id):
            self._unshown.add(found.request_id)
            # A key of its own: a destination of what the other one gives does not wait for this one.
            found = replace(
                found, give=Give(ModeChoice.PULL), target=b"", transfer_key=os.urandom(TRANSFER_KEY_BYTES_MIN)
            )
        if found.take is not None and not self._siblings.takes(found, cached=self.blocks.block_pool.enable_caching):
            found = replace(found, take=None)
        return found

    def match(self, request_id: str, computed_tokens: int) -> int | None:
        """Returns the tokens that come; None: vLLM asks again in its next step."""
        if request_id not in self._serving:
            return 0
        if self._siblings.waits(request_id):
            return None
        self._computed_tokens[request_id] = computed_tokens
        return self.scheduler.match(request_id, computed_tokens).tokens

    def allocated(self, request: "Request", table: tuple[list[int], ...], external_tokens: int) -> bool:
        """Takes a request's blocks. Returns False if nothing comes of it."""
        request_id = request.request_id
        if request_id not in self._serving:
            return False
        computed = self._computed_tokens.pop(request_id, 0)
        try:
            self.scheduler.allocated(request_id, without_null(table), computed, external_tokens, self._behind())
        except (InvalidRequest, PreconditionFailed) as error:
            _log.error("request %s gets no KV: %s", request_id, error)
            return False
        known = request_id in self.scheduler.policy
        if external_tokens:
            self._waiting[request_id] = request, computed
            if known:
                self.stats.waits(request_id)
        return known

    def step(self, output: "SchedulerOutput", *, waiting: bool, holding: bool) -> BlockStep:
        """Lets what is scheduled go once it is computed. Returns the message to the worker, with what came. `waiting`:
        requests wait for KV. `holding`: blocks of requests that left are held.
        """
        self._number += 1
        self._siblings.go_on(output.num_scheduled_tokens)
        for request_id in self._serving.intersection(output.preempted_req_ids or ()):
            self.scheduler.preempted(request_id)
        for request_id, request in self._computing.items():
            count = output.num_scheduled_tokens.get(request_id)
            if count and self.scheduler.policy.pushes(request_id):
                table = without_null(self.blocks.get_block_ids(request_id))
                self.scheduler.computed(request_id, table, request.num_computed_tokens + count, self._number)
        if holding:
            self.pressure.relieve(output, self.blocks.block_pool)
        step = BlockStep(self._number, report=self._overlap or any(map(self.scheduler.policy.pushes, self._computing)))
        idle = waiting and not output.total_num_scheduled_tokens
        now = time.monotonic()
        if waiting or self.scheduler.busy or now >= self._look_at:
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
                    request, here = self._waiting.pop(news.request_id)
                    if news.loss is None:
                        self.stats.received(news.tokens - here)
                        if news.tokens < request.num_computed_tokens:
                            reached(request, here, news.tokens)
                    else:
                        self.stats.lost(news.loss)
                        step.failed.add(news.request_id)
                        _log.warning("request %s got no KV: %s", news.request_id, _said(news.loss))
                case SendEnded():
                    step.sent.add(news.request_id)
                    self.stats.sent(news)
                case TakeLost():
                    if news.on_loss is OnLoss.RECOMPUTE:  # otherwise a load fails, and is counted then
                        self.stats.lost(news.loss)
                    _log.warning("request %s gets no KV: %s", news.request_id, _said(news.loss))
            self._forget(news.request_id)

    def reset(self, step: BlockStep) -> bool:
        """Ends all that is given, or comes, and puts what vLLM is to know into `step`. Returns False if some blocks are
        still being read or filled, and come back later.
        """
        for request_id in self._known:
            self.scheduler.aborted(request_id, "the engine's cache was reset")
        self._computing.clear()
        self._offers.clear()
        self._known = {request_id for request_id in self._known if request_id in self.scheduler.policy}
        deadline = time.monotonic() + RESET_S
        while self._known and (left_s := deadline - time.monotonic()) > 0:
            self._hear(self.scheduler.step(left_s), step)
        self._engine.flush()
        return not self._known

    def _forget(self, request_id: str) -> None:
        if request_id not in self.scheduler.policy:
            self._known.discard(request_id)

    def finished(self, request: "Request", table: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """Ends a request that left. Returns whether its blocks are held for now, and what the router relays."""
        request_id = request.request_id
        self._computing.pop(request_id, None)
        self._computed_tokens.pop(request_id, None)
        keep, answer = self._left(request, table, self._offers.pop(request_id, None))
        if answer:
            self._siblings.gave(request_id, answer)
        shared = self._siblings.left(request_id)
        if request_id in self._unshown:
            self._unshown.remove(request_id)
            answer = shared if request.status in COMPLETE else None
        return keep, answer

    def unheard(self, request_id: str, hook: str) -> None:
        """Ends a request for which vLLM did not call this hook: it moves nothing, and peers that wait are told."""
        why = f"vLLM does not call {hook} of this connector"
        self._serving.discard(request_id)
        self._computing.pop(request_id, None)
        self._offers.pop(request_id, None)
        self._siblings.left(request_id)
        self._unshown.discard(request_id)
        self.scheduler.aborted(request_id, why)
        self._forget(request_id)
        self.stats.unheard(why)

    def _left(
        self, request: "Request", table: tuple[list[int], ...], offer: ScheduledRequest | None
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hands over what a request that left gives. Returns whether to hold blocks, and what the router relays."""
        request_id = request.request_id
        if request_id not in self._serving:
            return False, None
        self._serving.remove(request_id)
        if request_id not in self.scheduler.policy:
            self._forget(request_id)
            return False, None
        complete = request.status in COMPLETE and request_id not in self._unshown
        if self._states and request.num_output_placeholders:
            complete = False  # steps in flight change its state, which is then of more tokens than it has
        outcome = Outcome.COMPLETE if complete else Outcome.ABORTED
        ids, computed, blocks = list(request.all_token_ids), request.num_computed_tokens, without_null(table)
        try:
            self.adapters.name(request.lora_request)
            found = self.scheduler.finished(request_id, ids, blocks, computed, outcome, self._behind())
            if offer is not None and complete and not found.keep:
                self.scheduler.arrived(offer)
                found = self.scheduler.finished(request_id, ids, blocks, computed, outcome, self._behind())
        except LeadDied:
            raise
        except KVGrpcError as error:
            _log.error("the KV of request %s goes nowhere: %s", request_id, error)
            found = self.scheduler.aborted(request_id, error.sentence)
        self._engine.flush()
        self._forget(request_id)
        return found.keep, self._answer(request) if found.handed_over else None

    def _answer(self, request: "Request") -> dict[str, Any] | None:
        """Returns what the router relays of a request that left; None: nothing was handed over."""
        params = request.kv_transfer_params
        trace = trace_of(request, params)
        if grant := self.scheduler.grant(request.request_id):
            return answered(grant, prefilled=params.get("do_remote_decode") is True, traceparent=trace)
        if key := self.scheduler.push_key(request.request_id):
            engine, tokens = self._engine, request.num_computed_tokens
            return answered_push(key, engine.engine_id, engine.address, tokens, trace)
        return None

    def _behind(self) -> int:
        """Returns the step after which blocks move that vLLM allocated or finished with; 0: no step runs."""
        return self._number if self._overlap else 0

    def hold(self, blocks: Sequence[int]) -> None:
        """Keeps blocks out of use, with one reference for each time that a block is listed."""
        pool = self.blocks.block_pool
        pool.touch([pool.blocks[block] for block in blocks])

    def release(self, blocks: Sequence[int]) -> None:
        """Drops a reference of each block. The prompt's end is evicted first, as when vLLM frees."""
        pool = self.blocks.block_pool
        pool.free_blocks([pool.blocks[block] for block in reversed(blocks)])

    def abandon(self) -> None:
        """Ends kvgrpc here at once. Peers use nothing of what they still read."""
        self._engine.abandon()

    def close(self) -> None:
        self._engine.close()


def _said(loss: Loss) -> str:
    return f"{loss.reason}: {loss.message}"
