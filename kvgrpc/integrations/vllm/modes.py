"""The modes of the connector: how each makes its two sides, of the engine's configuration."""

import logging
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.platforms import current_platform

from kvgrpc.core.values.layout import PoolLayout
from kvgrpc.engine import Engine
from kvgrpc.integrations.vllm.geometry import first_layers, joined, layout_of, unserved
from kvgrpc.integrations.vllm.identity import Kernels, factors_of, identity_across, identity_of
from kvgrpc.integrations.vllm.meeting import (
    MEET_S,
    MIRROR_S,
    BlockStep,
    WorkerGreeting,
    agreed,
    check_here,
    give_tickets,
    kernels_of_groups,
    of_ours,
)
from kvgrpc.integrations.vllm.options import BlockOptions
from kvgrpc.integrations.vllm.scheduler_side import SchedulerSide
from kvgrpc.integrations.vllm.tensors.messages import StoreGreeting, TensorStep
from kvgrpc.integrations.vllm.tensors.options import TensorOptions, check
from kvgrpc.integrations.vllm.tensors.scheduler_side import TensorSchedulerSide
from kvgrpc.integrations.vllm.tensors.worker_side import TensorWorkerSide
from kvgrpc.integrations.vllm.waking import tell_of_sleep
from kvgrpc.integrations.vllm.worker_side import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_log = logging.getLogger(__name__)
log = init_logger("vllm.kvgrpc")
"""Logger for what operators compare: vLLM shows what its own loggers say."""
AnyWorkerSide = WorkerSide | TensorWorkerSide
AnySchedulerSide = SchedulerSide | TensorSchedulerSide
Greetings = dict[tuple[int, int], Any]
"""First messages of the workers, by pipeline stage and rank."""


class BlockMode:
    """The mode that moves blocks from cache to cache."""

    no_step = BlockStep
    """Makes the message to the workers if kvgrpc is over."""

    def __init__(self, config: "VllmConfig", cache: "KVCacheConfig") -> None:
        self.options, self._layout = BlockOptions.of(config), layout_of(config, cache)
        self._config = config

    def worker_side(self) -> WorkerSide:
        return WorkerSide(self.options, self._layout)

    def scheduler_side(self, greetings: Greetings, blocks: Any) -> SchedulerSide:
        """Starts the scheduler's side, with vLLM's KVCacheManager. The identity of the KV needs what only workers know.

        Raises ValueError for workers that differ, or are elsewhere, and the errors of `launch`.
        """
        config, parallel = self._config, self._config.parallel_config
        ranks, count = range(parallel.tensor_parallel_size), parallel.pipeline_parallel_size
        met = [of_ours(WorkerGreeting, [greetings[stage, rank] for rank in ranks]) for stage in range(count)]
        check_here(met)
        stages = agreed(met)
        identity = self._identity(kernels_of_groups(stages))
        engine_id = config.kv_transfer_config.engine_id or ""
        # On a device a step goes on after its hooks; with several steps in flight others begin meanwhile.
        overlap = not current_platform.is_cpu() or config.max_concurrent_batches > 1
        layouts = [first.layout for first in stages]
        workers = [(of, first_layers(layouts, stage)) for stage, some in enumerate(met) for of in some]
        layout = joined(layouts)
        engine = launch(self.options, layout, engine_id, identity, workers)
        side = SchedulerSide(engine, self.options, layout, blocks, overlap=overlap, alone=met[0][0].alone)
        tell_of_sleep(side.held.sleeps)
        return side

    def _identity(self, kernels: Kernels) -> str:
        """Returns the identity of the KV, and logs what it is made of."""
        factors: object
        if self.options.across_engines:
            identity, factors = identity_across(self._config, self.options.weights_revision), "any program"
        else:
            factors = factors_of(self._config, self.options.weights_revision, kernels)
            identity = identity_of(factors)
        log.info("kvgrpc: KV is exchanged with engines of %s, which is of %s", identity, factors)
        return identity


def launch(
    options: BlockOptions,
    layout: PoolLayout,
    engine_id: str,
    revision: str,
    workers: list[tuple[WorkerGreeting, list[int]]],
) -> Engine:
    """Starts the lead of an engine that moves blocks, and waits until its workers are attached; see `give_tickets`."""
    named = ("--engine-id", engine_id) if engine_id else ()  # from its start on, for its traces
    engine = Engine.launch(
        listen=options.listen, flags=(*named, *options.lead_flags), pool=layout, private_memory=not options.mirror,
        mirrored=options.mirror, weights_revision=revision, engine_id=engine_id, world_size=len(workers),
        expects_pushes=True,
    )  # fmt: skip
    try:
        give_tickets(engine, workers, MIRROR_S if options.mirror else MEET_S)
    except Exception:
        engine.close()
        raise
    _log.info("kvgrpc: engine %s serves at %s", engine.engine_id, engine.address)
    return engine


class TensorMode:
    """The mode that moves named tensors by way of a store; see `tensors`."""

    no_step = TensorStep

    def __init__(self, config: "VllmConfig", cache: "KVCacheConfig") -> None:
        """Raises ValueError for an engine that this mode does not serve."""
        self.options, self._layout = TensorOptions.of(config), layout_of(config, cache)
        check(config, self.options, self._layout)

    def worker_side(self) -> TensorWorkerSide:
        return TensorWorkerSide(self.options, self._layout)

    def scheduler_side(self, greetings: Greetings, blocks: Any) -> TensorSchedulerSide:
        """Starts the scheduler's side, with vLLM's KVCacheManager. Raises ValueError if ranks compute differently."""
        met = of_ours(StoreGreeting, [greetings[0, rank] for rank in range(len(greetings))])
        if len({of.identity for of in met}) > 1:
            raise unserved("ranks that compute alike", "run all workers of this engine on the same kind of processor")
        log.info("kvgrpc: KV is exchanged as tensors with engines of %s, at %s", met[0].identity, met[0].address)
        return TensorSchedulerSide(self.options, self._layout, len(met), met[0].address, blocks)
