"""The scheduler's side: it decides what is put, asked for and loaded.

In every step vLLM asks about each request that takes tensors, and learns that it needs more time until all workers hold
what it lacks. Until then the request has no blocks, and nothing waits for it. Then it gets blocks, and its tensors are
copied into them at the beginning of the same step. So a slow or dead prefill engine delays this request, and no other.
"""

import logging
from typing import TYPE_CHECKING, Any

from kvgrpc.core.policy.values import Loss, OnLoss
from kvgrpc.core.tensors.store_layout import pages_for
from kvgrpc.errors import AlreadyExists, InvalidRequest, KVGrpcError, NextStep, OutOfRange, PreconditionFailed, Reason
from kvgrpc.integrations.params import PREFILLED_ELSEWHERE, RecentKeys, TensorWish, answered_named, asked_of
from kvgrpc.integrations.vllm.adapters import Adapters
from kvgrpc.integrations.vllm.prompts import COMPLETE, items_of, named_prompt
from kvgrpc.integrations.vllm.siblings import Siblings, is_told_of
from kvgrpc.integrations.vllm.stats import KVGrpcStats
from kvgrpc.integrations.vllm.tensors.messages import ExpectTask, LoadTask, PutTask, TensorStep, WorkerNews, loss_of
from kvgrpc.integrations.vllm.tensors.options import TensorOptions
from kvgrpc.integrations.vllm.tensors.pairing import Pairing
from kvgrpc.integrations.vllm.tensors.parts import Cut, PromptParts
from kvgrpc.integrations.vllm.tensors.requests import DecodeRequest, PrefillRequest

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvgrpc.core.values.layout import PoolLayout

_log = logging.getLogger(__name__)


class TensorSchedulerSide:
    """The decisions of one engine. A hook that raises is called again after `end`."""

    def __init__(self, options: TensorOptions, layout: "PoolLayout", ranks: int, address: str, blocks: Any) -> None:
        """`layout`: layout of one rank's cache. `ranks`: number of ranks. `address`: address of the store of rank 0.
        `blocks`: the KVCacheManager of vLLM.
        """
        self.stats, self.adapters, self.address = KVGrpcStats(), Adapters(), address
        self._options, self._ranks, self._blocks = options, ranks, blocks
        self._pairing = Pairing(options, address, ranks)
        self._cut = Cut(layout.groups[0].block_tokens, options.part_tokens, ranks)
        self._block_bytes = [region.block_bytes for region in layout.regions]
        n = options.layers_per_tensor
        self._tensors = [sum(self._block_bytes[i : i + n]) for i in range(0, len(self._block_bytes), n)]
        """Bytes of one block in each tensor of a part."""
        self._pages = options.store_bytes // options.page_bytes
        self._prefills: dict[str, PrefillRequest] = {}
        self._complete = RecentKeys()
        """Keys of which all tensors are put."""
        self._siblings = Siblings()
        self._decodes: dict[str, DecodeRequest] = {}
        self._users: dict[bytes, set[str]] = {}
        """Key -> requests that take under it: the answers of one prompt take the same tensors."""
        self._kept: dict[bytes, str] = {}
        """Key -> address of a source that keeps tensors of which not all were fetched."""
        self._asked_from: dict[bytes, int] = {}
        """Key -> the first part that was asked for. Puts of earlier parts are refused."""
        self._waiting_bytes = 0
        """Bytes of KV, on a rank, of all parts that requests wait for."""
        self._first = ""
        """The first request for which there was no room; empty: none. No other one is asked for before it."""
        self._next = TensorStep()
        """Tasks for the next step."""
        self._number = 0
        self._given = False
        """True if something was put since the last reset."""
        self._resets_in = 0
        """Number of the step that told the workers of a reset, until all have done it; 0: none."""
        self._forgot = 0
        """Number of workers that have done it."""
        self._over = ""
        """Reason why nothing is given or taken any more; empty: kvgrpc goes on."""

    # -- requests

    def arrived(self, request: "Request") -> None:
        """Takes in a request. One that cannot be served is logged, and gives or gets no KV."""
        wants, takes = None, PREFILLED_ELSEWHERE in asked_of(request.kv_transfer_params)
        try:
            wants = self._pairing.wanted(request)
            takes = wants is not None and not wants.gives
            if wants is not None:
                self._pairing.check(wants)
                if not self._is_anothers(request, wants):
                    self._admit(request, wants)
        except KVGrpcError as error:
            if wants is not None and wants.gives:
                self._not_given(wants.key)
            if request.abort_immediately:  # vLLM's API refused it
                return
            self.stats.refused(str(error))
            _log.warning("request %s moves no KV: %s", request.request_id, error)
            if takes:
                decode = self._decodes.setdefault(request.request_id, DecodeRequest(request.num_tokens))
                decode.lost, decode.refused = loss_of(error), True

    def _is_anothers(self, request: "Request", wants: TensorWish) -> bool:
        """Returns whether this request is to give or take nothing because a sibling does. That holds only for what
        params ask for: all siblings have the same params.
        """
        request_id = request.request_id
        if not asked_of(request.kv_transfer_params):  # its id says what it wants
            return False
        if not wants.gives:
            return not is_told_of(request_id)
        if self._siblings.gives(request_id):
            return False
        request.max_tokens = 1
        return True

    def _admit(self, request: "Request", wants: TensorWish) -> None:
        """Begins to give or take for a request. Raises KVGrpcError if it cannot."""
        decode = DecodeRequest(request.num_tokens, wants)
        if not wants.gives:
            self._users.setdefault(wants.key, set()).add(request.request_id)
            self._decodes[request.request_id] = decode
            if self._pairing.fetches(wants):
                self._kept.setdefault(wants.key, wants.peer)
        if request.abort_immediately:  # vLLM's API refused it, and shows it without its prompt
            self.finished(request)
            if wants.gives:
                self._not_given(wants.key)
            return
        if self._over:
            raise PreconditionFailed(Reason.ENGINE_LOST, f"kvgrpc is over in this engine: {self._over}")
        ids = named_prompt(request)
        if not ids:
            raise InvalidRequest(Reason.CONTENT_REQUIRED, "its prompt is more than token ids, and has no name")
        adapter, salt = self.adapters.name(request.lora_request), request.cache_salt or ""
        prompt = PromptParts(self._cut, ids, adapter=adapter, cache_salt=salt, items=items_of(request))
        if wants.gives:
            self._give(request, wants, prompt)
        else:
            decode.prompt = prompt
            fetches = self._pairing.fetches(wants)
            self._next.watches.append(ExpectTask(request.request_id, wants.key, wants.peer, [], 0, fetches))

    def _give(self, request: "Request", wants: TensorWish, prompt: PromptParts) -> None:
        if self._gives(wants.key):
            raise AlreadyExists(Reason.TRANSFER_EXISTS, "another request gives tensors under its transfer key")
        to = self._pairing.consumer(wants)
        if not to:
            self._check_room(prompt)
        request.max_tokens = 1
        self._prefills[request.request_id] = PrefillRequest(request, wants, prompt, to)

    def _gives(self, key: bytes) -> bool:
        return key in self._complete or any(prefill.wants.key == key for prefill in self._prefills.values())

    def _not_given(self, key: bytes) -> None:
        """Ends a key under which nothing is given: a decode engine may wait for it already."""
        if not self._gives(key):
            self._next.ended.append(key)

    def _check_room(self, prompt: PromptParts) -> None:
        """Raises OutOfRange (LIMIT_EXCEEDED) if a store cannot keep all tensors of a prompt."""
        counts, page_bytes = [len(prompt.blocks(number)) for number in range(prompt.parts)], self._options.page_bytes
        pages = sum(pages_for(count * nbytes, page_bytes) for count in counts for nbytes in self._tensors)
        if pages > self._pages:
            raise OutOfRange(
                Reason.LIMIT_EXCEEDED,
                f"its tensors take {pages} pages, and the store has {self._pages}: set store_bytes higher",
            )

    def match(self, request: "Request", computed_tokens: int) -> tuple[int | None, bool]:
        """Returns how many tokens come from elsewhere, and whether the request waits for them; None: ask again. If
        `on_loss` is FAIL, lost tokens count as a load that will fail, which is vLLM's own way to fail a request.
        """
        decode = self._decodes.get(request.request_id)
        if decode is None:
            return 0, False
        if not decode.lost:
            self._ask(request, decode, computed_tokens)
        if decode.lost:
            fails = self._options.on_loss is OnLoss.FAIL and not decode.computed_here
            lacks = max(0, decode.tokens - computed_tokens) if fails else 0
            return lacks, lacks > 0
        external = max(0, decode.tokens - 1 - computed_tokens)
        return (external, False) if decode.held or not external else (None, False)

    def _ask(self, request: "Request", decode: DecodeRequest, computed_tokens: int) -> None:
        """Asks for what a request lacks, and was not asked for before."""
        assert decode.prompt is not None
        assert decode.wants is not None
        needed, key = decode.prompt.needed(computed_tokens), decode.wants.key
        if not needed or (decode.asked and decode.asked.start <= needed.start):
            return
        decode.held = False
        puts = not self._pairing.fetches(decode.wants)
        if puts and needed.start < self._asked_from.get(key, 0):
            what = "what was here of its prompt left the cache while the rest came"
            decode.lost = Loss(Reason.CANCELLED, what, NextStep.RECOMPUTE)
            decode.computed_here = True
            return
        more = range(needed.start, decode.asked.start) if decode.asked else needed
        nbytes = sum(len(decode.prompt.blocks(number)) for number in more) * sum(self._block_bytes)
        if not decode.asked and not self._has_turn(request.request_id, nbytes):
            return
        first = self._asked_from.setdefault(key, needed.start)
        parts = [decode.prompt.part(number) for number in more]
        wants, let_go = decode.wants, first if puts else 0
        expect = ExpectTask(
            request.request_id, key, wants.peer, parts, let_go, not puts, wants.label, wants.traceparent
        )
        self._next.expects.append(expect)
        self.stats.waits(request.request_id)
        decode.asked = needed
        decode.nbytes += nbytes
        self._waiting_bytes += nbytes

    def _has_turn(self, request_id: str, nbytes: int) -> bool:
        """Returns whether a request may be asked for: there is room for it, and no other one waits for room."""
        if self._first not in self._decodes:
            self._first = ""
        full = self._waiting_bytes and self._waiting_bytes + nbytes > self._options.waiting_bytes
        if full or self._first not in {"", request_id}:
            self._first = self._first or request_id
            return False
        self._first = ""
        return True

    def allocated(self, request: "Request", table: tuple[list[int], ...], external_tokens: int) -> None:
        """Has a request's new blocks filled with `external_tokens` tokens, or the request failed. It takes nothing
        after this step.
        """
        (blocks,) = table
        decode = self._decodes.pop(request.request_id, None)
        if decode is None:
            if external_tokens:  # workers know no such load, and report its blocks as bad
                self._next.loads.append(LoadTask(f"{request.request_id}, which failed", 0, blocks))
            return
        self.stats.waited(request.request_id)
        if decode.lost is not None and not decode.refused:
            self.stats.lost(decode.lost)
        if external_tokens and decode.lost:
            self._next.loaded.add(request.request_id)
            self._next.failed.add(request.request_id)
        elif external_tokens:
            assert decode.prompt is not None
            lacking = decode.prompt.lacking(decode.tokens - 1 - external_tokens)
            self._next.loads.append(LoadTask(request.request_id, lacking.start, blocks[lacking.start : lacking.stop]))
            self.stats.received(external_tokens)
        self._leave(request.request_id, decode)

    def finished(self, request: "Request", _: tuple[list[int], ...] = ()) -> dict[str, Any] | None:
        """Ends a request that left. Returns what the router relays to the decode engine; None: nothing."""
        return self._siblings.left(request, self._left(request))

    def _left(self, request: "Request") -> dict[str, Any] | None:
        """Forgets a request. Returns the answer of one that gave its whole prompt; None: nothing."""
        decode = self._decodes.pop(request.request_id, None)
        if decode is not None:
            self._leave(request.request_id, decode)
        prefill = self._prefills.pop(request.request_id, None)
        if prefill is None:
            return None
        complete = request.status in COMPLETE and prefill.put == prefill.prompt.parts
        self.stats.gave(complete=complete)
        if complete:
            wants = prefill.wants
            self._complete.add(wants.key)
            return answered_named(wants.key, self.address, puts=bool(prefill.to), traceparent=wants.traceparent)
        self._next.ended.append(prefill.wants.key)
        return None

    def _leave(self, request_id: str, decode: DecodeRequest) -> None:
        self.stats.left(request_id)
        if decode.wants is None:
            return
        key = decode.wants.key
        self._waiting_bytes -= decode.nbytes
        for told in (self._next.watches, self._next.expects):
            told[:] = [expect for expect in told if expect.request_id != request_id]
        self._next.left.append(request_id)
        if decode.held and decode.prompt is not None and decode.asked == range(decode.prompt.parts):  # all was fetched
            self._kept.pop(key, None)
        self._users[key].discard(request_id)
        if not self._users[key]:
            del self._users[key]
            self._asked_from.pop(key, None)
            self._next.ended.append(key)
            if source := self._kept.pop(key, ""):
                self._next.given_back[key] = source

    # -- steps

    def step(self, output: "SchedulerOutput") -> TensorStep:
        for request_id, count in output.num_scheduled_tokens.items():
            prefill = self._prefills.get(request_id)
            if prefill is not None:
                self._put(prefill, prefill.request.num_computed_tokens + count)
        self._number += 1
        step, self._next = self._next, TensorStep()
        step.number = self._number
        step.idle = bool(self._decodes) and not output.total_num_scheduled_tokens
        if step.forget:
            self._resets_in, self._forgot, self._given = self._number, 0, bool(step.puts)
        return step

    def _put(self, prefill: PrefillRequest, computed_tokens: int) -> None:
        """Has the workers put the parts that are whole once `computed_tokens` tokens are computed."""
        request, wants = prefill.request, prefill.wants
        done = prefill.prompt.computed(computed_tokens)
        if done <= prefill.put:
            return
        try:
            self.adapters.name(request.lora_request)
        except KVGrpcError as error:
            _log.warning("request %s gives no KV: %s", request.request_id, error)
            del self._prefills[request.request_id]
            self._next.ended.append(wants.key)
            return
        (table,) = self._blocks.get_block_ids(request.request_id)
        for part in map(prefill.prompt.part, range(prefill.put, done)):
            blocks = list(table[part.first_block : part.first_block + part.blocks])
            name, trace = wants.label or request.request_id, wants.traceparent
            self._next.puts.append(PutTask(name, wants.key, prefill.to, part, blocks, wants.ttl_s, trace))
        prefill.put, self._given = done, True

    def hear(self, heard: WorkerNews) -> None:
        if heard.over:
            self.end(heard.over)
        for (request_id, key, parts), workers in heard.held.items():
            decode = self._decodes.get(request_id)
            if decode is not None and decode.takes(key):
                decode.workers[parts] += workers
                decode.held = decode.workers[len(decode.asked)] >= self._ranks
        for (request_id, key), loss in heard.lost.items():
            decode = self._decodes.get(request_id)
            if decode is not None and decode.takes(key):
                self._lose(request_id, decode, loss)
        self._forgot += heard.forgot[self._resets_in]
        if self._forgot >= self._ranks:
            self._resets_in = self._forgot = 0

    def _lose(self, request_id: str, decode: DecodeRequest, loss: Loss) -> None:
        if not decode.lost:
            decode.lost = loss
            _log.warning("request %s gets no KV: %s: %s", request_id, loss.reason, loss.message)

    # -- the engine

    @property
    def has_news(self) -> bool:
        """True if the workers must be told something, even without any request."""
        return self._resets or bool(self._next.ended)

    @property
    def _resets(self) -> bool:
        """True until all workers have ended what was put before a reset."""
        return self._next.forget or bool(self._resets_in)

    def reset(self) -> bool:
        """Ends all that is given or taken. Returns False until all workers have ended it; the next step tells them."""
        self._end_all(Loss(Reason.CANCELLED, "the engine's cache was reset", NextStep.RECOMPUTE))
        self._next.forget = self._next.forget or self._given
        return not self._resets

    def close(self) -> None:
        """Does nothing: each worker closes its store."""

    def end(self, why: str) -> None:
        """Ends kvgrpc in this engine for a reason: nothing is given or taken any more. Idempotent. Workers hear of it
        by the next steps.
        """
        if not self._over:
            self._over = why
            _log.error("kvgrpc is over in this engine, which goes on alone: %s", why)
        self._end_all(Loss(Reason.ENGINE_LOST, why, NextStep.RECOMPUTE))

    def _end_all(self, loss: Loss) -> None:
        """Ends all that is given or taken. Decode engines learn of it, also for parts that were not put yet."""
        self._next.ended += [prefill.wants.key for prefill in self._prefills.values()]
        self._prefills.clear()
        self._complete = RecentKeys()
        for request_id, decode in self._decodes.items():
            self._lose(request_id, decode, loss)
