"""What a worker puts: each layer of what is computed, as soon as it is queued on the device."""

import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

import torch

from kvgrpc.engine.tensors import PendingPut, TensorStore
from kvgrpc.errors import DeadlineExceeded, Exhausted, KVGrpcError, PreconditionFailed, Reason, Unavailable
from kvgrpc.integrations.vllm.tensors.messages import Put, TensorStep
from kvgrpc.integrations.vllm.tensors.options import Send, TensorOptions, address_of

_log = logging.getLogger(__name__)
KEPT_S = 600.0
"""A key under which something was put is remembered so long, for a reset: no lease lasts longer."""


class Sending:
    """One worker's."""

    def __init__(
        self, store: TensorStore, options: TensorOptions, rank: int, caches: Mapping[str, torch.Tensor]
    ) -> None:
        """`caches`: of each layer by its name, blocks first."""
        self._store, self._options, self._rank = store, options, rank
        self._caches = caches
        self._numbers = {name: number for number, name in enumerate(caches)}
        self._done: set[str] = set()
        """Layers of this step that are put."""
        self._pending: list[tuple[Put, PendingPut]] = []
        """Of this step."""
        self._lost: set[bytes] = set()
        """Keys of which something could not be put."""
        self._keys: dict[bytes, float] = {}
        """Under which something was put, and when; oldest first."""

    def layer_done(self, name: str, step: TensorStep) -> None:
        """This layer's part of the step is computed, or queued to be."""
        if not step.puts or name in self._done:
            return
        self._done.add(name)
        for put in step.puts:
            if put.key not in self._lost:
                self._put(name, put)

    def _put(self, name: str, put: Put) -> None:
        cache, number = self._caches[name], self._numbers[name]
        rows = cache.index_select(0, torch.tensor(put.blocks, device=cache.device))
        self._keys.pop(put.key, None)
        self._keys[put.key] = time.monotonic() + KEPT_S
        options: dict[str, Any] = {
            "to": [address_of(put.to, self._rank)] if put.to else (), "part": put.part.number, "layer": number,
            "content_digest": put.part.content_digest, "ttl_s": put.ttl_s, "timeout_s": self._options.timeout_s,
            "request_id": put.request_id,
        }  # fmt: skip
        try:
            try:
                pending = self._store.put_async(put.key, name, rows, **options)
            except Exhausted:  # too many wait to be copied
                self._store.wait_for_saved(self._options.timeout_s)
                pending = self._store.put_async(put.key, name, rows, **options)
        except Unavailable:
            raise
        except KVGrpcError as error:
            self._lose(put, error)
            return
        pending.future.add_done_callback(lambda future: self._over(put, future.exception()))
        self._pending.append((put, pending))

    def step_done(self, step: TensorStep) -> None:
        """All layers are computed, or queued to be. Returns when they are in the store, or, with `send` put, at the
        consumers; or when they will not be.
        """
        for name in self._caches if step.puts else ():  # where vLLM does not come by between layers
            self.layer_done(name, step)
        self._done.clear()
        until = time.monotonic() + self._options.timeout_s
        for put, pending in self._pending:
            future = pending.future if self._options.send is Send.PUT else pending.saved
            try:
                future.result(max(until - time.monotonic(), 0.0))
            except TimeoutError:
                self._lose(put, DeadlineExceeded(Reason.DEADLINE, "it did not get there in time"))
            except KVGrpcError:
                continue  # `_over` hears of it
        self._pending.clear()
        self._forget_old()

    def _over(self, put: Put, error: BaseException | None) -> None:
        """In the store's thread."""
        if isinstance(error, KVGrpcError):
            with contextlib.suppress(Unavailable):  # the store itself is over
                self._lose(put, error)

    def _lose(self, put: Put, error: KVGrpcError) -> None:
        """The consumer hears it: whoever waits for something of an ended request is refused."""
        if put.key in self._lost or put.key not in self._keys:
            return
        self._lost.add(put.key)
        level = logging.INFO if isinstance(error, PreconditionFailed) else logging.WARNING
        _log.log(level, "request %s gives no KV: part %d: %s", put.request_id, put.part.number, error.message)
        self._store.release_async(put.key)

    def ended(self, key: bytes) -> None:
        """Nothing is put under this key any more, and what was kept is not any more."""
        self._lost.discard(key)
        self._keys.pop(key, None)

    def forget(self) -> None:
        """The same of all of them, at once."""
        for ended in [self._store.release_async(key) for key in self._keys]:
            ended.result(self._options.timeout_s)
        self._keys.clear()
        self._lost.clear()

    def _forget_old(self) -> None:
        now = time.monotonic()
        while self._keys and (key := next(iter(self._keys))) and self._keys[key] < now:
            self.ended(key)
