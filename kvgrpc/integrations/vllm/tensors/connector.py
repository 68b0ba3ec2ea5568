"""KVGrpcConnector in this mode. Each hook goes to its side. No hook raises, except at the start."""

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvgrpc.integrations.old_settings import not_read
from kvgrpc.integrations.vllm.adapters import tell_of_loads
from kvgrpc.integrations.vllm.geometry import layout_of, unserved
from kvgrpc.integrations.vllm.identity import factors_of, identity_of, kernels_of
from kvgrpc.integrations.vllm.meeting import of_ours
from kvgrpc.integrations.vllm.proxy_registration import ProxyRegistration
from kvgrpc.integrations.vllm.stats import KVGrpcStats
from kvgrpc.integrations.vllm.tensors.messages import StoreGreeting, TensorStep, WorkerNews
from kvgrpc.integrations.vllm.tensors.options import TensorOptions, check
from kvgrpc.integrations.vllm.tensors.scheduler_side import TensorSchedulerSide
from kvgrpc.integrations.vllm.tensors.worker_side import TensorWorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_log = init_logger("vllm.kvgrpc")
_defects = logging.getLogger(__name__)
T = TypeVar("T")


class TensorConnector(KVConnectorBase_V1, SupportsHMA):
    """One side of the connector, as vLLM makes it in each of its processes."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._options, self._layout = TensorOptions.of(vllm_config), layout_of(vllm_config, kv_cache_config)
        check(vllm_config, self._options, self._layout)
        (group,) = kv_cache_config.kv_cache_groups
        self._layers = list(group.layer_names)
        self._proxy = self._options.proxy_of(vllm_config)
        self._registration: ProxyRegistration | None = None
        self._scheduler_side: TensorSchedulerSide | None = None
        scheduler = role is KVConnectorRole.SCHEDULER
        self._worker_side = None if scheduler else TensorWorkerSide(self._options, self._layout)
        for line in not_read(os.environ) if scheduler else ():
            _log.warning(line)

    # -- the scheduler's side

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], StoreGreeting]) -> None:
        """Completes the start with the addresses of the stores. Raises ValueError if the ranks compute differently."""
        met = of_ours(StoreGreeting, [metadata[0, rank] for rank in range(len(metadata))])
        if len({of.identity for of in met}) > 1:
            raise unserved("ranks that compute alike", "run all workers of this engine on the same kind of processor")
        _log.info("kvgrpc: KV is exchanged as tensors with engines of %s, at %s", met[0].identity, met[0].address)
        self._scheduler_side = TensorSchedulerSide(self._options, self._layout, len(met), met[0].address)
        self._scheduler_side.blocks = self._kv_cache_manager
        tell_of_loads(self._adapter_loaded)
        if self._proxy is not None:
            self._registration = ProxyRegistration(self._proxy, met[0].address)

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
        return (0,)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        (table,) = blocks.get_block_ids()
        known = self._do(lambda side: side.allocated(request, table, num_external_tokens), otherwise=False)
        if num_external_tokens and not known and self._scheduler_side is not None:
            self._scheduler_side.cannot_load(request.request_id, table)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> TensorStep:
        return self._do(lambda side: side.step(scheduler_output), otherwise=TensorStep())

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        heard = connector_output.kv_connector_worker_meta
        if isinstance(heard, WorkerNews):
            self._do(lambda side: side.hear(heard), otherwise=None)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:  # fmt: skip
        """Returns False, as blocks are never kept: tensors are copies. Adds what the router relays; None: nothing."""
        return False, self._do(lambda side: side.finished(request), otherwise=None)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Does the same; vLLM calls this one beside a connector that knows one group alone."""
        return self.request_finished_all_groups(request, (block_ids,))

    @property
    def requires_kv_delivery(self) -> bool:
        """Always true: each request says whether it is handed over, not the engine's `kv_role`."""
        return True

    def has_pending_push_work(self) -> bool:
        return self._scheduler_side is not None and self._scheduler_side.speaks

    def reset_cache(self) -> bool:
        return self._do(lambda side: side.reset(), otherwise=False)

    def _do(self, hook: Callable[[TensorSchedulerSide], T], *, otherwise: T) -> T:
        side = self._scheduler_side
        if side is None:
            return otherwise
        try:
            return hook(side)
        except Exception as defect:  # noqa: BLE001 - logged: the engine goes on without kvgrpc
            _defects.exception("kvgrpc is over in this engine")
            side.end(f"a defect of kvgrpc: {defect!r}")
            return otherwise

    # -- the worker's side

    @property
    def _in(self) -> TensorWorkerSide:
        assert self._worker_side is not None, "this is a scheduler's connector"
        return self._worker_side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._in.register(kv_caches, self._layers)

    def get_handshake_metadata(self) -> StoreGreeting:
        config = self._vllm_config
        identity = identity_of(factors_of(config, self._options.weights_revision, kernels_of(config, self._layers)))
        engine_id = config.kv_transfer_config.engine_id or ""
        return StoreGreeting(self._in.attach(engine_id, get_tensor_model_parallel_rank(), identity), identity)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Loads the KV that this step computes on, before it returns."""
        self._in.begin(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: all layers are loaded before the first one is computed."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Reports a computed layer. A tensor is put once its last layer is computed."""
        self._in.layer_done(layer_name, self._step())

    def wait_for_save(self) -> None:
        self._in.end(self._step())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        failed = set(self._step().failed)
        return KVConnectorTransferResults(finished_recving=failed, failed_recving=set(failed))

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._in.bad_blocks()

    def build_connector_worker_meta(self) -> WorkerNews | None:
        return self._in.heard() or None

    def _step(self) -> TensorStep:
        step = self._get_connector_metadata()
        assert isinstance(step, TensorStep)
        return step

    # -- both

    def get_kv_connector_stats(self) -> KVGrpcStats | None:
        return self._scheduler_side.stats.take() if self._scheduler_side is not None else None

    def shutdown(self) -> None:
        if self._registration is not None:
            self._registration.close()
        if self._worker_side is not None:
            self._worker_side.close()


TensorConnector.__name__ = "KVGrpcConnector"
"""Name of this connector's counts in a MultiConnector, whose configuration has no other name for it."""
