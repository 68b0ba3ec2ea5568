"""The class that vLLM makes once in its engine core and once in each worker; each hook goes to its side."""

import os
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvgrpc.integrations.old_settings import not_read
from kvgrpc.integrations.vllm.adapters import tell_of_loads
from kvgrpc.integrations.vllm.block_copies import CopyBlocks
from kvgrpc.integrations.vllm.geometry import REQUIRED_LAYOUT, layout_of, retain_windows
from kvgrpc.integrations.vllm.hooks import Hooks
from kvgrpc.integrations.vllm.identity import factors_of, identity_of, kernels_of
from kvgrpc.integrations.vllm.insides import told
from kvgrpc.integrations.vllm.meeting import BlockStep, WorkerGreeting, agreed, check_here, kernels_of_groups, of_ours
from kvgrpc.integrations.vllm.options import BlockOptions, choose_policy, export_traces
from kvgrpc.integrations.vllm.prometheus import PromMetrics
from kvgrpc.integrations.vllm.proxy_registration import ProxyRegistration
from kvgrpc.integrations.vllm.scheduler_side import SchedulerSide
from kvgrpc.integrations.vllm.stages import first_layers, joined
from kvgrpc.integrations.vllm.stats import KVGrpcStats
from kvgrpc.integrations.vllm.tensors.connector import TensorConnector
from kvgrpc.integrations.vllm.tensors.options import MODE as TENSORS
from kvgrpc.integrations.vllm.waking import tell_of_sleep
from kvgrpc.integrations.vllm.worker_side import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_log = init_logger("vllm.kvgrpc")
"""Logger for what operators compare: vLLM shows what its own loggers say."""


class KVGrpcConnector(KVConnectorBase_V1, SupportsHMA):
    """One side of the connector, as vLLM makes it in each of its processes."""

    _cache_hit_source = CacheHitSource.P2P

    def __new__(cls, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> Any:
        """Makes the connector of the configured mode."""
        choose_policy(vllm_config.kv_transfer_config)
        export_traces(vllm_config)
        if (vllm_config.kv_transfer_config.kv_connector_extra_config or {}).get("mode") == TENSORS:
            return TensorConnector(vllm_config, role, kv_cache_config)
        return super().__new__(cls)

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._options, self._layout = BlockOptions.of(vllm_config), layout_of(vllm_config, kv_cache_config)
        self._groups = [group.layer_names for group in kv_cache_config.kv_cache_groups]
        self._scheduler_side: SchedulerSide | None = None
        self._registration: ProxyRegistration | None = None
        if role is KVConnectorRole.SCHEDULER:
            retain_windows(kv_cache_config)
            for line in not_read(os.environ):
                _log.warning(line)
        self._worker_side = None if role is KVConnectorRole.SCHEDULER else WorkerSide(self._options, self._layout)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str:  # noqa: ARG003
        return REQUIRED_LAYOUT

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Returns whether layers are reported one by one: vLLM calls hooks between layers only in piecewise graphs."""
        return bool(extra_config.get("layers_per_part")) or extra_config.get("mode") == TENSORS

    # -- the scheduler's side

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._blocks = kv_cache_manager

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], WorkerGreeting]) -> None:
        """Completes the start: the identity of the KV needs what only workers know."""
        config, parallel = self._vllm_config, self._vllm_config.parallel_config
        ranks, count = range(parallel.tensor_parallel_size), parallel.pipeline_parallel_size
        met = [of_ours(WorkerGreeting, [metadata[stage, rank] for rank in ranks]) for stage in range(count)]
        check_here(met)
        stages = agreed(met)
        factors = factors_of(config, self._options.weights_revision, kernels_of_groups(stages))
        identity = identity_of(factors)
        _log.info("kvgrpc: KV is exchanged with engines of %s, which is of %s", identity, factors)
        engine_id = config.kv_transfer_config.engine_id or ""
        # On a device a step goes on after its hooks; with several steps in flight others begin meanwhile.
        overlap = not current_platform.is_cpu() or config.max_concurrent_batches > 1
        layouts = [first.layout for first in stages]
        self._scheduler_side = SchedulerSide(
            engine_id, self._options, joined(layouts), identity, overlap=overlap, ranks=len(ranks) * len(stages)
        )
        self._scheduler_side.blocks = self._blocks
        self._hooks = Hooks(self._scheduler_side, self._options.on_loss, alone=met[0][0].alone)
        self._scheduler_side.meet(
            [(Path(of.folder), first_layers(layouts, stage)) for stage, some in enumerate(met) for of in some]
        )
        tell_of_loads(self._hooks.adapter_loaded)
        if (proxy := self._options.proxy_of(config)) is not None:
            self._registration = ProxyRegistration(proxy, self._scheduler_side.address)
        tell_of_sleep(self._hooks.sleeps)

    def on_new_request(self, request: "Request") -> None:
        self._hooks.arrived(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self._hooks.match(request, num_computed_tokens)
        return tokens, bool(tokens)

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        return tuple(range(len(self._groups)))

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        self._hooks.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> BlockStep:
        return self._hooks.step(scheduler_output)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._hooks.finished(request, block_ids)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Does the same; vLLM calls this one beside a connector that knows one group alone."""
        return self.request_finished_all_groups(request, (block_ids,))

    @property
    def requires_kv_delivery(self) -> bool:
        """Always true: each request says whether it is handed over, not the engine's `kv_role`."""
        return True

    def has_pending_push_work(self) -> bool:
        return self._scheduler_side is not None and self._hooks.has_news

    def reset_cache(self) -> bool:
        return self._hooks.reset()

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Does nothing: the worker only reports what this side told it."""

    # -- the worker's side

    @property
    def _in(self) -> "WorkerSide":
        assert self._worker_side is not None, "this is a scheduler's connector"
        return self._worker_side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._in.register(kv_caches, self._groups)
        self._layout = told(self._vllm_config, self._layout, kv_caches, self._groups)

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocks) -> None:
        """Takes the function that copies a mirror's blocks, for a device that is no CUDA device."""
        self._in.copy_by(copy_operation)

    def get_handshake_metadata(self) -> WorkerGreeting:
        self._in.attach()
        kernels = [kernels_of(self._vllm_config, names) for names in self._groups]
        alone = get_kv_transfer_group() is self
        return WorkerGreeting(str(self._in.folder), kernels, self._layout, gethostname(), alone)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Does nothing: loads run beside the steps."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: what a step reads was there before the step began."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Reports a computed layer, whose KV may go."""
        self._in.layer_done(layer_name, self._step())

    def wait_for_save(self) -> None:
        self._in.step_done(self._step())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        step = self._step()
        return KVConnectorTransferResults(finished_recving=step.loaded, failed_recving=step.failed)

    def _step(self) -> BlockStep:
        step = self._get_connector_metadata()
        assert isinstance(step, BlockStep)
        return step

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
            self._hooks.close()
