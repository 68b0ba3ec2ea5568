"""The scheduler's hooks as vLLM calls them. No hook raises, and whatever becomes of kvgrpc, every request that waits
for KV hears of it exactly once, and every block that was handed over comes back exactly once.

vLLM ends an engine whose hook raises, and waits for ever for what is not reported. So a failure here ends kvgrpc in
this engine, never the engine, which goes on alone. The lead is ended then, so that peers use nothing of what they still
read. Blocks that were being filled stay out of use, since something may still write into them.

Handed-over blocks are held by a reference of our own, like those of a shared prefix, not by vLLM's delayed free: with
that an engine makes 750 empty steps a second while a block may be read. An idle engine sleeps, and is woken for one
step when its lead has news (`waking`).
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from kvgrpc.core.policy.values import OnLoss
from kvgrpc.integrations.params import FLAGS
from kvgrpc.integrations.vllm.block_tables import blocks_of
from kvgrpc.integrations.vllm.meeting import BlockStep
from kvgrpc.integrations.vllm.prompts import begin_anew
from kvgrpc.integrations.vllm.scheduler_side import SchedulerSide
from kvgrpc.integrations.vllm.waking import Bell, Ring

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)

Answer = tuple[bool, dict[str, Any] | None]
T = TypeVar("T")


class Hooks:
    """The hooks of one engine."""

    def __init__(self, side: SchedulerSide, on_loss: OnLoss, *, alone: bool = True) -> None:
        """`alone`: this is the engine's one connector, which has told vLLM what becomes of loads that fail."""
        self._side = side
        self._on_loss = on_loss
        self._alone = alone
        self._over = False
        self._wanting: set[str] = set()
        """Requests that were prefilled elsewhere, until they have blocks."""
        self._unserved: set[str] = set()
        """Requests of `_wanting` for which nothing will come."""
        self._loading: dict[str, tuple[Request, list[int]]] = {}
        """Requests that wait for KV, each with the blocks for it."""
        self._failed: set[str] = set()
        """Requests of `_loading` that wait in vain."""
        self._holding: dict[str, list[int]] = {}
        """Blocks that are held, of requests that left."""
        self._asking: set[str] = set()
        """Requests that ask for KV to move, until vLLM says that they left."""
        self._left: set[str] = set()
        """Requests that left since the last step. Another request may have the id already."""
        self._bell = Bell(side.fileno())

    def adapter_loaded(self, adapter: "LoRARequest") -> None:
        """Notes an adapter that is about to be loaded, or loaded anew."""
        self._do(lambda: self._side.adapters.seen(adapter), otherwise=None)

    def arrived(self, request: "Request") -> None:
        """Takes a request that arrived."""
        if request.lora_request is not None:
            self.adapter_loaded(request.lora_request)
        self._side.pressure.arrived(request)
        params = request.kv_transfer_params
        if not isinstance(params, dict):
            return
        if params.get("do_remote_prefill") is True:
            self._wanting.add(request.request_id)
        if FLAGS & {name for name, value in params.items() if value is True}:
            self._asking.add(request.request_id)
        if not self._do(lambda: self._side.arrived(request, params), otherwise=False):
            self._unserved |= self._wanting & {request.request_id}

    def match(self, request: "Request", computed_tokens: int) -> int | None:
        """Returns the tokens that come from elsewhere; None: vLLM asks again. KV that should come, and will not, is
        announced as a load that fails, if that is configured: it is vLLM's own way to say so.
        """
        request_id = request.request_id
        nothing: int | None = 0
        tokens = self._do(lambda: self._side.match(request_id, computed_tokens), otherwise=nothing)
        if tokens is None:
            return None
        self._side.pressure.asked_for(request, computed_tokens)
        if request_id in self._unserved and self._on_loss is OnLoss.FAIL:
            return max(0, int(request.num_tokens) - computed_tokens)
        return tokens

    def allocated(self, request: "Request", table: tuple[list[int], ...], external_tokens: int) -> None:
        """Takes a request's blocks. The second call for a request has no tokens to come."""
        request_id = request.request_id
        self._side.pressure.placed(request_id)
        self._wanting.discard(request_id)
        unserved = request_id in self._unserved
        self._unserved.discard(request_id)
        if external_tokens:
            self._loading[request_id] = request, blocks_of(table)
        known = not unserved and self._do(
            lambda: self._side.allocated(request, table, external_tokens), otherwise=False
        )
        if external_tokens and not known:
            self._failed.add(request_id)

    def step(self, output: "SchedulerOutput") -> BlockStep:
        """Returns what the worker is to report."""
        self._hear_of(output)
        waiting = bool(self._loading)
        step = (
            self._do(lambda: self._side.step(output, waiting=waiting, holding=bool(self._holding)), otherwise=None)
            or BlockStep()
        )
        step.loaded |= self._failed
        step.failed |= self._failed
        self._failed.clear()
        # Each is reported once: a second report, or one of a request that does not wait, ends the engine.
        step.loaded &= self._loading.keys()
        step.failed &= step.loaded
        if self._on_loss is OnLoss.RECOMPUTE and not self._alone:
            self._begin_anew(step)
        self._loading = {id_: load for id_, load in self._loading.items() if id_ not in step.loaded}
        self._release(step)
        return step

    def _hear_of(self, output: "SchedulerOutput") -> None:
        """Finds requests that vLLM ended or computed without a call of this connector's hooks: they move nothing."""
        ended = self._asking & (set(output.finished_req_ids) - self._left)
        self._left.clear()
        for hook, request_ids in (
            ("request_finished_all_groups or request_finished", ended),
            ("update_state_after_alloc", self._wanting & output.num_scheduled_tokens.keys()),
        ):
            for request_id in request_ids:
                self._asking.discard(request_id)
                self._wanting.discard(request_id)
                self._do(lambda r=request_id, h=hook: self._side.unheard(r, h), otherwise=None)  # type: ignore[misc]

    def _begin_anew(self, step: BlockStep) -> None:
        """Turns failed loads into loads of no tokens, which vLLM computes. The fate of failed loads is set by a key of
        vLLM's for all connectors, which is out of reach if several share an engine.
        """
        for request_id in list(step.failed):
            request, _ = self._loading[request_id]
            try:
                begin_anew(request, self._side.blocks)
            except Exception:  # noqa: BLE001 - logged: it fails
                _log.exception("request %s cannot begin anew", request_id)
            else:
                step.failed.discard(request_id)

    def _release(self, step: BlockStep) -> None:
        """Releases returned blocks, or all if their lead is gone: a lead that lives may vouch for other blocks."""
        gone = self._over and bool(self._holding) and self._side.lead_gone
        for request_id in self._holding.keys() & (self._holding.keys() if gone else step.sent):
            self._side.release(self._holding.pop(request_id))

    @property
    def has_news(self) -> bool:
        """True if an engine without requests has a step to make: blocks may have come back."""
        return bool(self._holding) and (self._over or self._side.has_news)

    def sleeps(self, ring: Ring) -> None:
        """Prepares to wake an engine that has nothing to do: blocks that it holds may come back meanwhile."""
        if self._holding and not self._over:
            self._bell.arm(ring)

    def finished(self, request: "Request", table: tuple[list[int], ...]) -> Answer:
        """Ends a request that left. vLLM keeps blocks that are still being filled until the load is reported."""
        request_id = request.request_id
        self._side.pressure.left(request_id)
        self._wanting.discard(request_id)
        self._asking.discard(request_id)
        self._left.add(request_id)
        self._unserved.discard(request_id)
        nothing: Answer = False, None
        return self._do(lambda: self._finished(request, table), otherwise=nothing)

    def _finished(self, request: "Request", table: tuple[list[int], ...]) -> Answer:
        keep, params = self._side.finished(request, table)
        if keep and request.request_id not in self._loading:
            blocks = blocks_of(table)
            self._side.hold(blocks)
            self._holding[request.request_id] = blocks
        return False, params

    def reset(self) -> bool:
        """Drops what was computed before, for example with old weights: on return nothing of it is offered, and nothing
        that was to come is used. Returns False if some is, or if its blocks are still being read or filled.
        """
        self._unserved |= self._wanting
        step = BlockStep()
        done = self._do(lambda: self._side.reset(step), otherwise=False) or self._over
        self._failed |= step.loaded & self._loading.keys()
        self._release(step)
        return done

    def close(self) -> None:
        """Ends kvgrpc, as the engine ends."""
        self._over = True
        self._bell.close()
        self._side.close()

    def _do(self, hook: Callable[[], T], *, otherwise: T) -> T:
        if self._over:
            return otherwise
        try:
            return hook()
        except Exception:  # noqa: BLE001 - logged: the engine goes on without kvgrpc
            _log.exception("kvgrpc is over in this engine, which goes on alone")
            self._end()
            return otherwise

    def _end(self) -> None:
        self._over = True
        self._unserved |= self._wanting
        self._failed |= self._loading.keys()
        self._try(self._bell.close)
        self._try(self._side.abandon)
        self._try(lambda: self._side.hold([block for _, blocks in self._loading.values() for block in blocks]))

    def _try(self, what: Callable[[], None]) -> None:
        try:
            what()
        except Exception:  # noqa: BLE001 - logged: the engine goes on without kvgrpc
            _log.exception("kvgrpc did not end in order")
