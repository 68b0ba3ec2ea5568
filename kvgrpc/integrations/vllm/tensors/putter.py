"""The tensors that a worker puts: a stack of layers goes as soon as its last layer is queued on the device.

A step makes copies in the memory of the engine. They go into the store when there is room. A step does not wait for a
full store: if the waiting copies take too much memory, the request of the next one gives no KV.
"""

import logging
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import suppress
from typing import Any

import torch

from kvgrpc.core.values.ids import request_label
from kvgrpc.engine.tensors import PendingPut, TensorStore
from kvgrpc.errors import AlreadyExists, DeadlineExceeded, Exhausted, KVGrpcError, Reason, Unavailable
from kvgrpc.integrations.vllm.tensors.messages import PutTask, TensorStep
from kvgrpc.integrations.vllm.tensors.options import SendMode, TensorOptions, WhenFull, address_of
from kvgrpc.integrations.vllm.tensors.stacks import Stack, stacks

_log = logging.getLogger(__name__)
KEPT_S = 600.0
"""Time after a put's timeout, in seconds, for which its key is remembered for a reset: by default the maximum age of a
tensor that nobody asks for. A longer TTL, or a consumer that waits for kept tensors, can make a tensor outlast it.
"""


class TensorPutter:
    """The putting side of one worker."""

    def __init__(
        self, store: TensorStore, options: TensorOptions, rank: int, caches: Mapping[str, torch.Tensor]
    ) -> None:
        """`caches`: cache of each layer, by name. Its first dimension is blocks."""
        self._store, self._options, self._rank = store, options, rank
        self._caches = caches
        self._stack_of = {name: stack for stack in stacks(caches, options.layers_per_tensor) for name in stack.layers}
        self._done: set[str] = set()
        """Layers of this step that are computed, or queued on the device."""
        self._until: float | None = None
        """Deadline of this step's waits, by the monotonic clock. None: it has not waited."""
        self._pending: list[tuple[PutTask, PendingPut]] = []
        """Puts for which this step waits at its end."""
        self._queued: deque[tuple[int, PendingPut]] = deque()
        """Copies that were not in the store at the last check, with their bytes; the oldest first."""
        self.queued_bytes = 0
        """Bytes of the copies in `_queued`."""
        self._lost: set[bytes] = set()
        """Keys under which a put failed."""
        self._keys: dict[bytes, tuple[float, str]] = {}
        """Keys with puts -> time until which they are remembered, and the consumer's address; the oldest first."""

    def layer_done(self, name: str, step: TensorStep) -> None:
        """Notes that a layer is computed, or queued on the device. Puts the stack that is complete with it."""
        if not step.puts or name in self._done:
            return
        self._done.add(name)
        stack = self._stack_of[name]
        if not self._done.issuperset(stack.layers):
            return
        for put in step.puts:
            if put.key not in self._lost:
                self._put(stack, put)

    def _put(self, stack: Stack, put: PutTask) -> None:
        self._keys.pop(put.key, None)
        self._keys[put.key] = time.monotonic() + KEPT_S + self._options.timeout_s, self._consumer_of(put)
        try:
            pending = self._begin(stack, put)
        except Unavailable:
            raise
        except KVGrpcError as error:
            self._lose(put, error)
            return
        pending.future.add_done_callback(lambda future: self._over(put, future.exception()))
        if self._options.send is SendMode.PUT and put.to:
            self._pending.append((put, pending))

    def _begin(self, stack: Stack, put: PutTask) -> PendingPut:
        """Copies the blocks and begins their put. Raises the error of a refused put, or of no room for the copy."""
        nbytes = len(put.blocks) * sum(self._caches[name][0].nbytes for name in stack.layers)
        self._await_room(nbytes)
        name, rows = stack.name(self._rank), stack.gather(self._caches, put.blocks)
        options: dict[str, Any] = {
            "to": [consumer] if (consumer := self._consumer_of(put)) else (), "part": put.part.number,
            "layer": stack.number, "content_digest": put.part.content_digest, "ttl_s": put.ttl_s,
            "timeout_s": self._options.timeout_s, "request_id": request_label(put.request_id),
            "traceparent": put.traceparent,
        }  # fmt: skip
        try:
            pending = self._store.put_async(put.key, name, rows, **options)
        except Exhausted:  # the store's queue of copies is full
            self._await_room(self._options.queued_bytes + 1)
            pending = self._store.put_async(put.key, name, rows, **options)
        self._queued.append((nbytes, pending))
        self.queued_bytes += nbytes
        return pending

    def _await_room(self, nbytes: int) -> None:
        """Waits until a copy of `nbytes` bytes may be made. Any copy may be made once all others are in the store.
        Raises DeadlineExceeded (DEADLINE), and with `WhenFull.GIVE_UP` Exhausted (POOL_EXHAUSTED) if the oldest copy
        waits for room in the store.
        """
        gives_up = self._options.when_full is WhenFull.GIVE_UP
        while self._queued:
            size, oldest = self._queued[0]
            if not oldest.saved.done():
                if self.queued_bytes + nbytes <= self._options.queued_bytes:
                    return
                wait((oldest.saved, oldest.full) if gives_up else (oldest.saved,), self._left_s(), FIRST_COMPLETED)
                if gives_up and oldest.full.done() and not oldest.saved.done():
                    text = f"the store is full, and {self.queued_bytes} bytes wait for room in it"
                    raise Exhausted(Reason.POOL_EXHAUSTED, text, retry_delay_s=1.0)
                if not oldest.saved.done():
                    raise DeadlineExceeded(Reason.DEADLINE, "what was put before is not copied in time")
            self._queued.popleft()
            self.queued_bytes -= size

    def _left_s(self) -> float:
        """Returns the seconds that this step may still wait, in all. The first call sets the deadline."""
        now = time.monotonic()
        self._until = self._until or now + self._options.timeout_s
        return max(self._until - now, 0.0)

    def _consumer_of(self, put: PutTask) -> str:
        """Returns the address of the consumer's store; empty: the part is kept."""
        return address_of(put.to, self._rank) if put.to else ""

    def step_done(self, step: TensorStep) -> None:
        """Notes that all layers are computed, or queued on the device. With `SendMode.PUT` returns when their tensors
        are at the consumers, or never will be.
        """
        for name in self._caches if step.puts else ():  # vLLM may call no hook between layers
            self.layer_done(name, step)
        self._done.clear()
        for put, pending in self._pending:
            try:
                pending.future.result(self._left_s())
            except TimeoutError:
                self._lose(put, DeadlineExceeded(Reason.DEADLINE, "it did not get there in time"))
            except KVGrpcError:
                continue  # `_over` handles it
        self._pending.clear()
        self._until = None
        self._forget_old()

    def _over(self, put: PutTask, error: BaseException | None) -> None:
        """Runs in the store's thread."""
        if isinstance(error, KVGrpcError):
            with suppress(Unavailable):  # the store is closed or lost
                self._lose(put, error)

    def _lose(self, put: PutTask, error: KVGrpcError) -> None:
        """Ends the key of a failed put: nothing more is put under it, and the store tells the consumer. A put that its
        consumer let go changes nothing. A key whose name is taken does not end at the store: another request has it.
        """
        if error.reason is Reason.TRANSFER_ENDED or put.key in self._lost or put.key not in self._keys:
            return
        self._lost.add(put.key)
        _log.warning("request %s gives no KV: part %d: %s", put.request_id, put.part.number, error)
        if not isinstance(error, AlreadyExists):
            self._store.release_async(put.key)

    def ended(self, key: bytes) -> None:
        """Forgets a key whose request is over. The caller ends it at the store."""
        self._lost.discard(key)
        self._keys.pop(key, None)

    def forget(self) -> None:
        """Ends all remembered keys here, and then at their consumers, where tensors may lie that nobody has taken.
        Raises Unavailable, and DeadlineExceeded (DEADLINE) if this store has not ended them in `timeout_s`. Consumers
        that could not be told in `timeout_s` are logged.
        """
        ended = [self._store.release_async(key) for key in self._keys]
        done, late = wait(ended, self._options.timeout_s)
        if late:
            raise DeadlineExceeded(Reason.DEADLINE, f"{len(late)} requests were not ended in time")
        for one in done:
            one.result()
        self._tell_consumers()
        self._keys.clear()
        self._lost.clear()

    def _tell_consumers(self) -> None:
        """Tells the consumers that the keys have ended, and logs those that could not be told."""
        told = {self._store.release_async(key, source=at): at for key, (_, at) in self._keys.items() if at}
        done, _ = wait(told, self._options.timeout_s)
        unheard: dict[str, object] = {}
        for one, at in told.items():
            if one not in done or one.exception() is not None:
                unheard[at] = one.exception() if one in done else "it did not answer in time"
        for at, why in unheard.items():
            _log.warning("%s was not told of the reset, and may keep what was put there before it: %s", at, why)

    def _forget_old(self) -> None:
        now = time.monotonic()
        while self._keys and (key := next(iter(self._keys))) and self._keys[key][0] < now:
            self.ended(key)
