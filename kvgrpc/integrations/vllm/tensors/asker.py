"""A worker's calls for tensors. A lead lets a bounded number of calls wait, puts among them. So a worker has a bounded
number in flight.

Rules:
* A call ends after a while, and another key has its turn. A call that brings its tensor is followed by one of its key.
* A call for which the lead has no room is retried later, with half as many calls in flight at most. Each tensor that
  comes adds one to that limit.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from kvgrpc.engine.tensors import StoredTensor, TensorStore
from kvgrpc.errors import DeadlineExceeded, Exhausted, InternalError, KVGrpcError, Reason

_log = logging.getLogger(__name__)
CALLS_MAX = 1_024
"""Maximum number of calls in flight: a quarter of those that a lead lets wait."""
CALL_S = 3.0
"""Maximum time that a call waits, in seconds."""
AGAIN_S = 0.1
"""Delay after a refusal, in seconds."""


@dataclass(eq=False)
class TensorAsk:
    """A request for one tensor."""

    key: bytes
    name: str
    over: Callable[[torch.Tensor | None, KVGrpcError | None], None]
    """Called with the tensor, copied out of the store, or with the error; in the thread of TensorAsker."""
    wanted: Callable[[], bool]
    """False if nobody takes the tensor any more. It is dropped before its next call then, without a call of `over`."""
    until: float = math.inf
    """Deadline, by the monotonic clock."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further options of `TensorStore.get_async`, for the first call."""
    later: dict[str, Any] = field(default_factory=dict)
    """Further options of later calls."""


class TensorAsker:
    """The calls of one worker. Its thread makes them, and copies the tensors that come."""

    def __init__(self, store: TensorStore, calls_max: int = CALLS_MAX) -> None:
        self._store, self._calls_max = store, calls_max
        self._thread = ThreadPoolExecutor(1, "kvgrpc-take")
        self._queues: dict[bytes, deque[TensorAsk]] = {}
        """Tensors to ask for, by key; the first key has its turn next."""
        self._under_way, self._most = 0, calls_max
        """`_most`: maximum number of calls in flight at present."""
        self._again_at = 0.0
        """Time of the next try after a refusal, by the monotonic clock; 0: there was none."""

    def ask(self, asks: Iterable[TensorAsk]) -> None:
        """Asks for all of these. Those of a key are asked for in this order."""
        self._do(self._add, list(asks))

    def turn(self) -> None:
        """Retries after a refusal. To be called in every step."""
        if self._again_at and self._again_at <= time.monotonic():
            self._again_at = 0.0
            self._do(self._call)

    def close(self) -> None:
        """Ends the thread after its current task, without waiting. No tensor is reported after that."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _do(self, what: Callable[..., None], *of: Any) -> None:
        with suppress(RuntimeError):  # `close` was called
            self._thread.submit(what, *of)

    # -- in its thread

    def _add(self, asks: Iterable[TensorAsk]) -> None:
        for ask in asks:
            self._queues.setdefault(ask.key, deque()).append(ask)
        self._call()

    def _next(self, key: bytes) -> TensorAsk:
        """Returns the next tensor of this key, or else of the key whose turn it is, which becomes the last key."""
        queue = self._queues.get(key)
        if queue is None:
            key, queue = next(iter(self._queues.items()))
            self._queues[key] = self._queues.pop(key)
        ask = queue.popleft()
        if not queue:
            del self._queues[key]
        return ask

    def _call(self, key: bytes = b"") -> None:
        """Makes as many calls as may be in flight, those of this key first."""
        while self._queues and self._under_way < self._most:
            ask = self._next(key)
            if not ask.wanted():
                continue
            left_s = ask.until - time.monotonic()
            if left_s <= 0:
                ask.over(None, DeadlineExceeded(Reason.DEADLINE, f"tensor {ask.name} did not come in time"))
                continue
            try:
                found = self._store.get_async(ask.key, ask.name, timeout_s=min(CALL_S, left_s), **ask.more)
            except KVGrpcError as error:
                ask.over(None, error)
                continue
            self._under_way += 1
            found.add_done_callback(lambda found, ask=ask: self._do(self._answered, ask, found))  # type: ignore[misc]

    def _answered(self, ask: TensorAsk, found: "Future[StoredTensor]") -> None:
        self._under_way -= 1
        try:
            with found.result() as tensor:
                copy = tensor.torch().clone()
        except Exhausted:
            self._queues.setdefault(ask.key, deque()).appendleft(ask)
            self._most = max(min(self._most, self._under_way // 2), 1)
            self._again_at = time.monotonic() + AGAIN_S
            return
        except KVGrpcError as error:
            if error.reason is Reason.DEADLINE and time.monotonic() < ask.until:
                ask.more = ask.later
                self._queues.setdefault(ask.key, deque()).append(ask)
            else:
                ask.over(None, error)
        except Exception as defect:  # noqa: BLE001 - only this request fails
            _log.exception("a tensor could not be taken")
            ask.over(None, InternalError(Reason.INTERNAL, f"a defect of kvgrpc: {defect!r}"))
        else:
            ask.over(copy, None)
            self._most = min(self._most + 1, self._calls_max)
            self._call(ask.key)
            return
        self._call()
