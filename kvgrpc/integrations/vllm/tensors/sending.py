"""What a worker puts: some layers of what is computed, as soon as the last of them is queued on the device.

A step ends with copies, in the memory of the engine; in the store these are when there is room. A store that is full is
no reason for a step to wait: where the copies that wait for room take too much, the next one's request gives no KV.
"""

import logging
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import suppress
from typing import Any

import torch

from kvgrpc.engine.tensors import PendingPut, TensorStore
from kvgrpc.errors import AlreadyExists, DeadlineExceeded, Exhausted, KVGrpcError, Reason, Unavailable
from kvgrpc.integrations.vllm.tensors.messages import Put, TensorStep
from kvgrpc.integrations.vllm.tensors.options import Send, TensorOptions, WhenFull, address_of
from kvgrpc.integrations.vllm.tensors.stacks import Stack, stacks

_log = logging.getLogger(__name__)
KEPT_S = 600.0
"""A key under which something was put is remembered so long, and as long as a put may take, for a reset: with the
limits that leads have by default nothing is kept longer.
"""


class Sending:
    """One worker's."""

    def __init__(
        self, store: TensorStore, options: TensorOptions, rank: int, caches: Mapping[str, torch.Tensor]
    ) -> None:
        """`caches`: of each layer by its name, blocks first."""
        self._store, self._options, self._rank = store, options, rank
        self._caches = caches
        self._stack_of = {name: stack for stack in stacks(caches, options.layers_per_tensor) for name in stack.layers}
        self._done: set[str] = set()
        """Layers of this step that are computed, or queued to be."""
        self._until: float | None = None
        """When this step waits no longer, by the monotonic clock; None: it had not to wait."""
        self._pending: list[tuple[Put, PendingPut]] = []
        """Of this step, that it waits for."""
        self._queued: deque[tuple[int, PendingPut]] = deque()
        """Copies that were not in the store when it was looked last, with their bytes; oldest first."""
        self.queued_bytes = 0
        """Of these."""
        self._lost: set[bytes] = set()
        """Keys of which something could not be put."""
        self._keys: dict[bytes, tuple[float, str]] = {}
        """Under which something was put, until when that is remembered, and the consumer's address; oldest first."""

    def layer_done(self, name: str, step: TensorStep) -> None:
        """This layer's part of the step is computed, or queued to be."""
        if not step.puts or name in self._done:
            return
        self._done.add(name)
        stack = self._stack_of[name]
        if not self._done.issuperset(stack.layers):
            return
        for put in step.puts:
            if put.key not in self._lost:
                self._put(stack, put)

    def _put(self, stack: Stack, put: Put) -> None:
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
        if self._options.send is Send.PUT and put.to:
            self._pending.append((put, pending))

    def _begin(self, stack: Stack, put: Put) -> PendingPut:
        """Raises what it is refused with, also where there is no room for its copy."""
        nbytes = len(put.blocks) * sum(self._caches[name][0].nbytes for name in stack.layers)
        self._await_room(nbytes)
        name, rows = stack.name(self._rank), stack.gather(self._caches, put.blocks)
        options: dict[str, Any] = {
            "to": [consumer] if (consumer := self._consumer_of(put)) else (), "part": put.part.number,
            "layer": stack.number, "content_digest": put.part.content_digest, "ttl_s": put.ttl_s,
            "timeout_s": self._options.timeout_s, "request_id": put.request_id, "traceparent": put.traceparent,
        }  # fmt: skip
        try:
            pending = self._store.put_async(put.key, name, rows, **options)
        except Exhausted:  # too many wait to be copied
            self._await_room(self._options.queued_bytes + 1)
            pending = self._store.put_async(put.key, name, rows, **options)
        self._queued.append((nbytes, pending))
        self.queued_bytes += nbytes
        return pending

    def _await_room(self, nbytes: int) -> None:
        """For a copy of so many bytes: there is some for one in any case, when those before it are copied. Raises
        Exhausted (POOL_EXHAUSTED) where these wait for room in the store, unless the step is to wait with them, and
        DeadlineExceeded (DEADLINE).
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
        """So long this step may still wait, in all."""
        now = time.monotonic()
        self._until = self._until or now + self._options.timeout_s
        return max(self._until - now, 0.0)

    def _consumer_of(self, put: Put) -> str:
        """Its store's address; empty: it is kept."""
        return address_of(put.to, self._rank) if put.to else ""

    def step_done(self, step: TensorStep) -> None:
        """All layers are computed, or queued to be. With `send` put it returns when they are at the consumers, or will
        not be.
        """
        for name in self._caches if step.puts else ():  # where vLLM does not come by between layers
            self.layer_done(name, step)
        self._done.clear()
        for put, pending in self._pending:
            try:
                pending.future.result(self._left_s())
            except TimeoutError:
                self._lose(put, DeadlineExceeded(Reason.DEADLINE, "it did not get there in time"))
            except KVGrpcError:
                continue  # `_over` hears of it
        self._pending.clear()
        self._until = None
        self._forget_old()

    def _over(self, put: Put, error: BaseException | None) -> None:
        """In the store's thread."""
        if isinstance(error, KVGrpcError):
            with suppress(Unavailable):  # the store itself is over
                self._lose(put, error)

    def _lose(self, put: Put, error: KVGrpcError) -> None:
        """A part was refused, so nothing more of its request is put. The store ends the request, by which the consumer
        hears of it. What the consumer let go ends nothing, nor does a name that another request has: the key is its.
        """
        if error.reason is Reason.TRANSFER_ENDED or put.key in self._lost or put.key not in self._keys:
            return
        self._lost.add(put.key)
        _log.warning("request %s gives no KV: part %d: %s", put.request_id, put.part.number, error)
        if not isinstance(error, AlreadyExists):
            self._store.release_async(put.key)

    def ended(self, key: bytes) -> None:
        """The request under this key is over, and is ended at the store by the caller."""
        self._lost.discard(key)
        self._keys.pop(key, None)

    def forget(self) -> None:
        """Ends all requests for which something was put, here and at their consumers, where it may lie and nobody has
        taken it; and returns when the store has ended them. Raises Unavailable, and DeadlineExceeded (DEADLINE) after
        `timeout_s`. A consumer that does not hear of it is logged.
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
        """That what was put there has ended."""
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
