"""The class that vLLM makes once in its engine core and once in each worker; each hook goes to its side."""

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvgrpc.integrations.old_settings import TENSORS, not_read
from kvgrpc.integrations.vllm.adapters import tell_of_loads
from kvgrpc.integrations.vllm.block_copies import CopyBlocks
from kvgrpc.integrations.vllm.geometry import REQUIRED_LAYOUT, retain_windows
from kvgrpc.integrations.vllm.meeting import BlockStep, WorkerGreeting
from kvgrpc.integrations.vllm.modes import AnySchedulerSide, AnyWorkerSide, BlockMode, Greetings, TensorMode, log
from kvgrpc.integrations.vllm.options import choose_policy, export_traces
from kvgrpc.integrations.vllm.prometheus import PromMetrics
from kvgrpc.integrations.vllm.proxy_registration import ProxyRegistration
from kvgrpc.integrations.vllm.stats import KVGrpcStats
from kvgrpc.integrations.vllm.tensors.messages import StoreGreeting, WorkerNews

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_defects = logging.getLogger(__name__)
T = TypeVar("T")


class KVGrpcConnector(KVConnectorBase_V1, SupportsHMA):
    """One side of the connector, as vLLM makes it in each of its processes. The mode says which class a side has."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        choose_policy(transfer)
        export_traces(vllm_config)
        stated = (transfer.kv_connector_extra_config or {}).get("mode")
        mode: type[BlockMode | TensorMode] = TensorMode if stated == TENSORS else BlockMode
        self._mode = mode(vllm_config, kv_cache_config)
        self._groups = [group.layer_names for group in kv_cache_config.kv_cache_groups]
        self._scheduler_side: AnySchedulerSide | None = None
        self._worker_side: AnyWorkerSide | None = None
        self._registration: ProxyRegistration | None = None
        if role is not KVConnectorRole.SCHEDULER:
            self._worker_side = self._mode.worker_side()
            return
        retain_windows(kv_cache_config)
        for line in not_read(os.environ):
            log.warning(line)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str:  # noqa: ARG003
        return REQUIRED_LAYOUT

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Returns whether layers are reported one by one: vLLM calls hooks between layers only in piecewise graphs."""
        return bool(extra_config.get("layers_per_part")) or extra_config.get("mode") == TENSORS

    # -- the scheduler's side

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Greetings) -> None:
        """Completes the start."""
        self._scheduler_side = self._mode.scheduler_side(metadata, self._kv_cache_manager)
        tell_of_loads(self._adapter_loaded)
        if (proxy := self._mode.options.proxy_of(self._vllm_config)) is not None:
            self._registration = ProxyRegistration(proxy, self._scheduler_side.address)

    def _adapter_loaded(self, adapter: "LoRARequest") -> None:
        self._do(lambda side: side.adapters.seen(adapter), otherwise=None)

    def on_new_request(self, request: "Request") -> None:
        if request.lora_request is not None:
            self._adapter_loaded(request.lora_request)
        self._do(lambda side: side.arrived(request), otherwise=None)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        nothing: tuple[int | None, bool] = (0, False)
        return self._do(lambda side: side.match(request, num_computed_tokens), otherwise=nothing)

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        return tuple(range(len(self._groups)))

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        table = blocks.get_block_ids()
        self._do(lambda side: side.allocated(request, table, num_external_tokens), otherwise=None)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> BlockStep:
        return self._do(lambda side: side.step(scheduler_output), otherwise=None) or self._mode.no_step()

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        heard = connector_output.kv_connector_worker_meta
        if isinstance(heard, WorkerNews):
            self._do(lambda side: side.hear(heard), otherwise=None)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Returns False, as vLLM's delayed free is not used, and what the router relays; None: nothing."""
        return False, self._do(lambda side: side.finished(request, block_ids), otherwise=None)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Does the same; vLLM calls this one beside a connector that knows one group alone."""
        return self.request_finished_all_groups(request, (block_ids,))

    @property
    def requires_kv_delivery(self) -> bool:
        """Always true: each request says whether it is handed over, not the engine's `kv_role`."""
        return True

    def has_pending_push_work(self) -> bool:
        return self._scheduler_side is not None and self._scheduler_side.has_news

    def reset_cache(self) -> bool:
        return self._do(lambda side: side.reset(), otherwise=False)

    def _do(self, hook: Callable[[AnySchedulerSide], T], *, otherwise: T) -> T:
        """Calls a hook of the scheduler's side. No hook raises, as vLLM ends an engine whose hook does: a failure ends
        kvgrpc in this engine, which goes on alone. The hook is called again then, as vLLM waits for what it tells.
        """
        side = self._scheduler_side
        if side is None:
            return otherwise
        for _ in range(2):
            try:
                return hook(side)
            except Exception as defect:  # noqa: BLE001 - logged: the engine goes on without kvgrpc
                _defects.exception("kvgrpc is over in this engine, which goes on alone")
                side.end(f"a defect of kvgrpc: {defect!r}")
        return otherwise

    # -- the worker's side

    @property
    def _in(self) -> AnyWorkerSide:
        assert self._worker_side is not None, "this is a scheduler's connector"
        return self._worker_side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._in.register(kv_caches, self._groups)

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocks) -> None:
        """Takes the function that copies a mirror's blocks, for a device that is no CUDA device."""
        self._in.copy_by(copy_operation)

    def get_handshake_metadata(self) -> WorkerGreeting | StoreGreeting:
        return self._in.greet(self._vllm_config, alone=get_kv_transfer_group() is self)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Loads the KV that this step computes on, before it returns."""
        self._in.begin(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: what a step reads was there before the step began, or is loaded by `start_load_kv`."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Reports a computed layer, whose KV may go."""
        self._in.layer_done(layer_name, self._step)

    def wait_for_save(self) -> None:
        self._in.step_done(self._step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        step: BlockStep = self._step
        return KVConnectorTransferResults(finished_recving=step.loaded, failed_recving=step.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._in.bad_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._in.heard()

    @property
    def _step(self) -> Any:
        """The message of the scheduler's side of this mode."""
        return self._get_connector_metadata()

    # -- both

    def get_kv_connector_stats(self) -> KVGrpcStats | None:
        return self._scheduler_side.stats.take() if self._scheduler_side is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVGrpcStats:
        return KVGrpcStats(data=data) if data else KVGrpcStats()

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> PromMetrics:
        return PromMetrics(*arguments)

    def shutdown(self) -> None:
        if self._registration is not None:
            self._registration.close()
        if self._worker_side is not None:
            self._worker_side.close()
        elif self._scheduler_side is not None:  # otherwise the start failed
            self._scheduler_side.close()
