"""Both sides of the connector without an engine: what they tell vLLM, and which blocks vLLM may use.

vLLM's block pool is real; its requests and steps are stand-ins with the fields that are read.
"""

import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import RequestStatus

from kvgrpc.core.policy.values import ModeChoice, OnLoss
from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout, uniform_layout
from kvgrpc.integrations.params import Defaults
from kvgrpc.integrations.vllm.connector import KVGrpcConnector
from kvgrpc.integrations.vllm.device import marks_of
from kvgrpc.integrations.vllm.geometry import strides_of
from kvgrpc.integrations.vllm.meeting import BlockStep, WorkerGreeting
from kvgrpc.integrations.vllm.modes import AnySchedulerSide, BlockMode, TensorMode, launch
from kvgrpc.integrations.vllm.options import BlockOptions
from kvgrpc.integrations.vllm.scheduler_side import SchedulerSide
from kvgrpc.integrations.vllm.waking import Ring
from kvgrpc.integrations.vllm.worker_side import Devices, Marks, WorkerSide
from tests.vllm.engines import PREFILL

LAYERS, BLOCK_TOKENS, BLOCKS = 2, 16, 16
PROMPT = list(range(40))


class Hooks:
    """A connector's hooks on a scheduler's side, without vLLM's own objects around their arguments."""

    def __init__(self, side: AnySchedulerSide) -> None:
        self._side, self._connector = side, object.__new__(KVGrpcConnector)
        mode: type[BlockMode | TensorMode] = BlockMode if isinstance(side, SchedulerSide) else TensorMode
        self._connector._scheduler_side, self._connector._mode = side, object.__new__(mode)
        self.arrived = self._connector.on_new_request
        self.adapter_loaded = self._connector._adapter_loaded
        self.step: Any = self._connector.build_connector_meta
        self.finished = self._connector.request_finished_all_groups
        self.reset = self._connector.reset_cache

    def match(self, request: Any, computed_tokens: int) -> int | None:
        return self._connector.get_num_new_matched_tokens(request, computed_tokens)[0]

    def allocated(self, request: Any, table: tuple[list[int], ...], external_tokens: int) -> None:
        blocks: Any = SimpleNamespace(get_block_ids=lambda: table)
        self._connector.update_state_after_alloc(request, blocks, external_tokens)

    @property
    def has_news(self) -> bool:
        return self._connector.has_pending_push_work()

    def sleeps(self, ring: Ring) -> None:
        assert isinstance(self._side, SchedulerSide)
        self._side.held.sleeps(ring)

    def close(self) -> None:
        self._side.close()


class Core:
    """The scheduler's side and the worker's side of one engine."""

    def __init__(
        self, name: str, on_loss: OnLoss = OnLoss.FAIL, *, overlap: bool = True, offer_ttl_s: float = 0.0,
        firm_ttl_s: float | None = None, layers_per_part: int = 0, marks: Marks = marks_of,
        devices: Devices | None = None, states: bool = False, mode: ModeChoice = ModeChoice.AUTO, alone: bool = True,
        cache: tuple[PoolLayout, Sequence[torch.Tensor]] | None = None, pairing_secret: bytes = b"",
    ) -> None:  # fmt: skip
        """`marks` are those of the device that computes; `devices` gives it a mirror. `states`: its layers have states
        and no attention. `cache` replaces the one of `pool_of`, with as many layers and blocks.
        """
        defaults = Defaults(mode, offer_ttl_s=offer_ttl_s, firm_ttl_s=firm_ttl_s, pairing_secret=pairing_secret)
        mirror = bool(devices)
        options = BlockOptions(
            defaults=defaults, on_loss=on_loss, data_paths=("nixl",), layers_per_part=layers_per_part, mirror=mirror
        )
        layout, memory = cache or pool_of(states=states)
        self.block_tokens = layout.groups[0].block_tokens if cache else BLOCK_TOKENS
        self.memory = {str(layer): memory[layer] for layer in range(LAYERS)}
        self.worker = WorkerSide(options, layout, marks, devices)
        self.worker.register(self.memory, [list(self.memory)])
        greeting = WorkerGreeting(str(self.worker.folder), [], layout)
        self.worker.attach(greeting.place)
        try:
            engine = launch(options, layout, name, "weights", [(greeting, [0])])
        except Exception:
            self.worker.close()
            raise
        self.pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=self.block_tokens)
        self.tables: dict[str, list[int]] = {}
        """Block tables of requests that are pushed."""
        blocks = SimpleNamespace(
            block_pool=self.pool, get_block_ids=lambda name: (self.tables[name],), free=self._begins_anew
        )
        self.side = SchedulerSide(engine, options, layout, blocks, overlap=overlap, alone=alone)
        self.hooks = Hooks(self.side)
        self.told = BlockStep()
        self.anew: list[str] = []
        """Requests that vLLM is to begin anew."""

    def close(self) -> None:
        self.hooks.close()
        self.worker.close()

    def _begins_anew(self, request: Any) -> None:
        """Records the request. vLLM would free its blocks here; the test keeps them."""
        self.anew.append(request.request_id)

    def step(self, tokens: Mapping[str, int] | None = None, preempted: Any = None, ended: Any = ()) -> bool:
        """Runs one step. `tokens` are the tokens it computes, by request; `ended` are requests that vLLM reports
        over.
        """
        step = self.hooks.step(scheduled(tokens, preempted, ended))
        assert not step.loaded & self.told.loaded, "told twice"
        self.told.loaded |= step.loaded
        self.told.failed |= step.failed
        for layer in self.memory:
            self.worker.layer_done(layer, step)
        self.worker.step_done(step)
        return True

    def allocate(self, count: int | None = None) -> list[int]:
        """Returns `count` blocks, or as many as the prompt takes."""
        count = -(-len(PROMPT) // self.block_tokens) if count is None else count
        return [block.block_id for block in self.pool.get_new_blocks(count)]

    def used(self) -> int:
        free: int = self.pool.get_num_free_blocks()
        return BLOCKS - 1 - free  # the first block is vLLM's null block

    def free(self, blocks: list[int]) -> None:
        """Frees blocks, as vLLM does after a request left."""
        self.pool.free_blocks([self.pool.blocks[block] for block in reversed(blocks)])

    def prefilled(self, name: str, **fields: Any) -> dict[str, Any]:
        """Computes a prompt for a request with these `fields`, and ends it. Returns the answer's params."""
        request = request_of(name, PREFILL, **fields)
        return self.left(request, self.computing(request))

    def computing(self, request: Any) -> list[int]:
        """Computes a prompt and returns its blocks."""
        self.hooks.arrived(request)
        blocks = self.allocate()
        self.hooks.allocated(request, (blocks,), 0)
        for number, layer in enumerate(self.memory.values()):
            layer[blocks] = 7 + number
        return blocks

    def left(self, request: Any, blocks: list[int]) -> dict[str, Any]:
        """Ends a request and returns the params that its answer has for the router."""
        request.status, request.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, len(PROMPT)
        keep, params = self.hooks.finished(request, (blocks,))
        assert not keep
        self.free(blocks)
        return params or {}

    def begin(self, request: Any) -> list[int]:
        """Begins a request that waits for its KV, and returns its blocks."""
        self.hooks.arrived(request)
        tokens = self.hooks.match(request, 0)
        assert tokens == len(PROMPT)
        blocks = self.allocate()
        self.hooks.allocated(request, (blocks,), tokens)
        return blocks


def pool_of(*, states: bool) -> tuple[PoolLayout, torch.Tensor]:
    """Returns a pool of one group, and its layers as vLLM shows them."""
    if states:
        group = Group("state", GroupKind.STATE, LAYERS, 2048, BLOCKS, 1, 64, "float32")
        return uniform_layout(group, 256), torch.zeros(LAYERS, BLOCKS, 1, 1, 256, dtype=torch.int8)
    group = Group("full", GroupKind.FULL_ATTENTION, LAYERS, BLOCK_TOKENS, BLOCKS, 1, 8, "float16")
    layout = uniform_layout(group, 2 * BLOCK_TOKENS * 8 * 2, strides=strides_of(group, 2))
    return layout, torch.zeros(LAYERS, BLOCKS, 1, BLOCK_TOKENS, 2 * 8, dtype=torch.float16)


Cores = tuple[Core, Core]
"""Prefill and decode."""


def scheduled(tokens: Mapping[str, int] | None = None, preempted: Any = None, ended: Any = ()) -> Any:
    """Returns a step that computes this many tokens of each request."""
    counts = dict(tokens or {})
    cached = SimpleNamespace(req_ids=list(counts), num_computed_tokens=[0] * len(counts))
    return SimpleNamespace(
        preempted_req_ids=preempted, num_scheduled_tokens=counts, total_num_scheduled_tokens=sum(counts.values()),
        scheduled_cached_reqs=cached, scheduled_new_reqs=[], finished_req_ids=set(ended),
    )  # fmt: skip


def request_of(name: str, params: Any, **fields: Any) -> Any:
    made = SimpleNamespace(
        request_id=name, kv_transfer_params=params, prompt_token_ids=PROMPT, all_token_ids=PROMPT, lora_request=None,
        cache_salt=None, sampling_params=None, num_tokens=len(PROMPT), num_computed_tokens=0, max_tokens=1,
        status=RequestStatus.FINISHED_ABORTED, abort_immediately=False, prompt_embeds=None, mm_features=[],
        arrival_time=time.time(), prefill_stats=None, trace_headers=None,
    )  # fmt: skip
    vars(made).update(fields)
    return made
