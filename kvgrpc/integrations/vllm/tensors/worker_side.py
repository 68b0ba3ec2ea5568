"""The worker's side: its store, and its tasks in a step. No hook raises, as vLLM ends an engine whose hook does."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from vllm.distributed import get_tensor_model_parallel_rank

from kvgrpc.core.values.layout import PoolLayout
from kvgrpc.engine.cuda_memory import CudaMemory
from kvgrpc.engine.tensors import TensorStore
from kvgrpc.errors import KVGrpcError
from kvgrpc.integrations.vllm.block_copies import CopyBlocks
from kvgrpc.integrations.vllm.geometry import memory_of, unserved
from kvgrpc.integrations.vllm.identity import factors_of, identity_of, kernels_of
from kvgrpc.integrations.vllm.tensors.messages import LoadTask, StoreGreeting, TensorStep, WorkerNews
from kvgrpc.integrations.vllm.tensors.options import TensorOptions, address_of
from kvgrpc.integrations.vllm.tensors.putter import TensorPutter
from kvgrpc.integrations.vllm.tensors.taker import TensorTaker

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_log = logging.getLogger(__name__)


class TensorWorkerSide:
    """The side of one worker. It has a store from `attach` on."""

    def __init__(self, options: TensorOptions, layout: PoolLayout) -> None:
        self._options, self._layout = options, layout
        self._caches: dict[str, torch.Tensor] = {}
        self._store: TensorStore | None = None
        self._memory: _StoreMemory | None = None
        """Memory of the store with `store_on_device`. None: shared memory."""
        self._sides: tuple[TensorPutter, TensorTaker] | None = None
        """None without a store: before `attach`, and after `close`."""
        self._rank = 0
        self._over = ""
        self._forgot_in = 0
        """Number of the last step for which the end of earlier puts was reported."""
        self._heard = WorkerNews()
        self._bad_blocks: set[int] = set()

    def register(self, caches: Mapping[str, torch.Tensor], layers: Sequence[Sequence[str]]) -> None:
        """Takes the caches. `layers`: names of the one group's layers. Raises ValueError for a cache that is not where
        the pool says.
        """
        memory_of(self._layout, caches, layers)
        self._caches = {name: _plain(caches[name]) for name in layers[0]}

    def copy_by(self, copy: CopyBlocks) -> None:
        """Does nothing: tensors are copied by torch."""

    def greet(self, config: "VllmConfig", *, alone: bool) -> StoreGreeting:
        """Starts the store, and returns what the scheduler's side is to know of it."""
        identity = identity_of(factors_of(config, self._options.weights_revision, kernels_of(config, [*self._caches])))
        engine_id = config.kv_transfer_config.engine_id or ""
        return StoreGreeting(self.attach(engine_id, get_tensor_model_parallel_rank(), identity), identity)

    def attach(self, engine_id: str, rank: int, identity: str) -> str:
        """Starts the store on the first call. Returns its address."""
        if self._store is None:
            options, self._rank = self._options, rank
            if options.store_on_device:
                self._memory = _StoreMemory(next(iter(self._caches.values())).device, options.store_bytes)
            own = {"store_bytes": options.store_bytes} if self._memory is None else {"memory": self._memory.tensor}
            self._store = TensorStore.launch(
                **own, page_bytes=options.page_bytes, listen=address_of(options.listen, rank),
                data_paths=options.data_paths,
                flags=("--data-paths", ",".join(options.data_paths), *options.serve_flags),
                engine_id=f"{engine_id}-{rank}" if engine_id and rank else engine_id, weights_revision=identity,
            )  # fmt: skip
            self._sides = (
                TensorPutter(self._store, options, rank, self._caches),
                TensorTaker(self._store, options, rank, self._caches),
            )
        return self._store.address

    def begin(self, step: TensorStep) -> None:
        """Begins a step (`start_load_kv`). Loads come first: their requests are in `left` of the same step."""
        for load in step.loads:
            if not self._do(lambda sides, load=load: self._load(sides[1], load)):  # type: ignore[misc]
                self._bad_blocks |= set(load.blocks)
        if not self._do(lambda sides: self._take(sides, step)):
            self._forgotten(step)  # it ended with the store

    def layer_done(self, name: str, step: TensorStep) -> None:
        """Puts what is complete now that a layer is computed, or queued on the device."""
        if step.puts:
            self._do(lambda sides: self._layer_done(sides, name, step))

    def step_done(self, step: TensorStep) -> None:
        """Ends a step: all layers are computed, or queued on the device."""
        self._do(lambda sides: self._end(sides, step))

    def heard(self) -> WorkerNews | None:
        """Returns the news for the scheduler's side since the last call; None: there is none."""
        if self._sides is not None:
            self._do(lambda sides: sides[1].hear(self._heard))
        heard, self._heard = self._heard, WorkerNews()
        heard.over = self._over
        return heard or None

    def bad_blocks(self) -> set[int]:
        """Returns the blocks that were to be filled since the last call, and are not."""
        found, self._bad_blocks = self._bad_blocks, set()
        return found

    def close(self) -> None:
        """Closes the store. Idempotent."""
        sides, self._sides = self._sides, None
        if sides is not None:
            sides[1].close()
        if self._store is not None:
            self._store.close()
        if self._memory is not None:
            self._memory.close()

    def _load(self, receiving: TensorTaker, load: LoadTask) -> None:
        try:
            receiving.load(load)
        except KVGrpcError as error:
            _log.warning("request %s gets no KV: %s", load.request_id, error)
            self._bad_blocks |= set(load.blocks)

    def _layer_done(self, sides: tuple[TensorPutter, TensorTaker], name: str, step: TensorStep) -> None:
        self._forget(sides[0], step)
        sides[0].layer_done(name, step)

    def _forget(self, sending: TensorPutter, step: TensorStep) -> None:
        """Ends earlier puts, before anything is put in this step."""
        if step.forget and self._forgot_in != step.number:
            sending.forget()
            self._forgotten(step)

    def _forgotten(self, step: TensorStep) -> None:
        """Reports, once for each step, that earlier puts are ended."""
        if step.forget and self._forgot_in != step.number:
            self._forgot_in = step.number
            self._heard.forgot[step.number] += 1

    def _take(self, sides: tuple[TensorPutter, TensorTaker], step: TensorStep) -> None:
        sending, receiving = sides
        assert self._store is not None
        for request_id in step.left:
            receiving.left(request_id)
        for key in step.ended:
            sending.ended(key)
            receiving.ended(key)
            self._store.release_async(key)  # also if the source cannot be told
        for key, source in step.given_back.items():
            self._store.release_async(key, source=address_of(source, self._rank))
        self._forget(sending, step)
        for expect in (*step.watches, *step.expects):
            receiving.expect(expect)

    def _end(self, sides: tuple[TensorPutter, TensorTaker], step: TensorStep) -> None:
        sides[0].step_done(step)
        if step.idle:
            sides[1].wait()

    def _do(self, what: Callable[[tuple[TensorPutter, TensorTaker]], None]) -> bool:
        """Runs a task. Returns False without a store, or if the task fails: then kvgrpc is over in this worker, and its
        store is closed, so that engines that wait for its tensors learn of it.
        """
        if self._sides is None:
            return False
        try:
            what(self._sides)
        except Exception as error:  # noqa: BLE001 - logged: the engine goes on without kvgrpc
            _log.exception("kvgrpc is over in this worker")
            self._over = f"a worker lost its store: {error}"
            try:
                self.close()
            except Exception:  # noqa: BLE001 - logged: the store is gone anyway
                _log.exception("the store did not close")
            return False
        return True


def _plain(cache: torch.Tensor) -> torch.Tensor:
    """Returns a cache. Elements of one byte become uint8, because torch lacks operations on fp8."""
    return cache.view(torch.uint8) if cache.element_size() == 1 else cache


class _StoreMemory:
    """The memory of a store on the device where the engine computes: `nbytes` bytes in `tensor`, until `close`. On GPUs
    tensors move from device to device. Peers on the same host read it by descriptors, if the driver can make them.

    Raises ValueError for a device that is neither the host nor a CUDA GPU, and the errors of CudaMemory.
    """

    tensor: torch.Tensor

    def __init__(self, device: torch.device, nbytes: int) -> None:
        if device.type not in ("cpu", "cuda"):
            raise unserved(f"stores on GPUs of CUDA; this engine computes on {device}", "leave `store_on_device` unset")
        self._made = None if device.type == "cpu" else CudaMemory(str(device), nbytes, exported=True)
        self.tensor = torch.zeros(nbytes, dtype=torch.uint8) if self._made is None else self._made.tensor

    def close(self) -> None:
        """Frees memory of a GPU. Nothing may use `tensor` any more. Idempotent."""
        if self._made is not None:
            self._made.close()
