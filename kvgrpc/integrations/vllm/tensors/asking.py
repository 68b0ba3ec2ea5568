"""A worker's calls for tensors. A lead lets a bounded number of calls wait, those that put tensors among them; so a
worker has a bounded number under way.

Rules:
* A call lasts a while, then it is the turn of another key. One that brings its tensor is followed by one of its key.
* Who is refused for being one too many asks again later, and until then has half as many calls under way.
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
"""Under way: a quarter of what a lead lets wait."""
CALL_S = 3.0
"""So long a call waits."""
AGAIN_S = 0.1
"""After a refusal."""


@dataclass(eq=False)
class Ask:
    """One tensor."""

    key: bytes
    name: str
    over: Callable[[torch.Tensor | None, KVGrpcError | None], None]
    """Hears of the tensor, copied out of the store, or why it does not come; in the thread of Asking."""
    wanted: Callable[[], bool]
    """Whether anybody still takes it; else nothing is heard of it."""
    until: float = math.inf
    """When it must be here, by the monotonic clock."""
    more: dict[str, Any] = field(default_factory=dict)
    """Of `TensorStore.get_async`."""
    later: dict[str, Any] = field(default_factory=dict)
    """The same, of the calls after the first one."""


class Asking:
    """One worker's. It has a thread, which makes the calls, and copies what they bring."""

    def __init__(self, store: TensorStore, calls_max: int = CALLS_MAX) -> None:
        self._store, self._calls_max = store, calls_max
        self._thread = ThreadPoolExecutor(1, "kvgrpc-take")
        self._queues: dict[bytes, deque[Ask]] = {}
        """By key, in turn."""
        self._under_way, self._most = 0, calls_max
        """`_most`: may be, at present."""
        self._again_at = 0.0
        """When to call again after a refusal; 0: there was none."""

    def ask(self, asks: Iterable[Ask]) -> None:
        """For all of these, those of a key in this order."""
        self._do(self._add, list(asks))

    def turn(self) -> None:
        """Calls for what was refused. To be called in every step."""
        if self._again_at and self._again_at <= time.monotonic():
            self._again_at = 0.0
            self._do(self._call)

    def close(self) -> None:
        """Nothing is heard of any tensor from here on."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _do(self, what: Callable[..., None], *of: Any) -> None:
        with suppress(RuntimeError):  # nobody takes anything any more
            self._thread.submit(what, *of)

    # -- in its thread

    def _add(self, asks: Iterable[Ask]) -> None:
        for ask in asks:
            self._queues.setdefault(ask.key, deque()).append(ask)
        self._call()

    def _next(self, key: bytes) -> Ask:
        """Of this key, if there is one; else of the key whose turn it is, which is the last one then."""
        queue = self._queues.get(key)
        if queue is None:
            key, queue = next(iter(self._queues.items()))
            self._queues[key] = self._queues.pop(key)
        ask = queue.popleft()
        if not queue:
            del self._queues[key]
        return ask

    def _call(self, key: bytes = b"") -> None:
        """As many as may be under way, first those of this key."""
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

    def _answered(self, ask: Ask, found: "Future[StoredTensor]") -> None:
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
        except Exception as defect:  # noqa: BLE001 - it is the request's
            _log.exception("a tensor could not be taken")
            ask.over(None, InternalError(Reason.INTERNAL, f"a defect of kvgrpc: {defect!r}"))
        else:
            ask.over(copy, None)
            self._most = min(self._most + 1, self._calls_max)
            self._call(ask.key)
            return
        self._call()
