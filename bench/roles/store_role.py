"""Role "store" of a child process: an engine that moves named tensors, with a lead of its own."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.plan import path_of
from bench.roles.role import Answer
from bench.stages.memory import fill
from kvgrpc.engine.tensors import NewTensor, StoredTensor, TensorStore
from kvgrpc.errors import InternalError, Reason


class StoreRole:
    """The commands of this role are its public methods. Tensors are named by their number."""

    def __init__(self) -> None:
        self._store: TensorStore | None = None
        self._tensors: list[NDArray[np.uint8]] = []

    async def perform(self, command: str, arguments: dict[str, Any], fds: list[int]) -> Answer:  # noqa: ARG002
        """Performs one command."""
        method: Callable[..., dict[str, Any]] = getattr(self, command)
        return await asyncio.to_thread(method, **arguments), []

    async def close(self) -> None:
        self.stop()

    def start(self, data_path: str, store_bytes: int, tensor_bytes: int, count: int) -> dict[str, Any]:
        """Starts a store, and makes tensors to put. Returns the address of its lead."""
        self.stop()
        flags = ["--data-paths", path_of(data_path)]
        self._store = TensorStore.launch(store_bytes=store_bytes, flags=flags, weights_revision="bench")
        whole = np.empty(tensor_bytes * count, dtype=np.uint8)
        fill(whole)
        self._tensors = list(whole.reshape(count, tensor_bytes))
        return {"address": self._store.address}

    def stop(self) -> dict[str, Any]:
        """Ends the store."""
        store, self._store = self._store, None
        if store is not None:
            store.close()
        return {}

    def put(self, key: str, to: str, at_once: bool, in_place: bool) -> dict[str, Any]:
        """Puts all tensors, one after the other or `at_once`. With `in_place` they are computed in the store first.
        Returns when the first was put.
        """
        store = self._started()
        tensors = [self._computed(tensor) for tensor in self._tensors] if in_place else self._tensors
        began_ns = time.monotonic_ns()
        puts = []
        for number, tensor in enumerate(tensors):
            put = store.put_async(bytes.fromhex(key), number, tensor, to=[to])
            if at_once:
                puts.append(put)
            else:
                put.result()
        for put in puts:
            put.result()
        return {"began_ns": began_ns}

    def keep(self, key: str) -> dict[str, Any]:
        """Puts all tensors, for one consumer to fetch."""
        store = self._started()
        for put in [store.put_async(bytes.fromhex(key), number, tensor) for number, tensor in enumerate(self._tensors)]:
            put.result()
        return {}

    def get(self, key: str, source: str, at_once: int) -> dict[str, Any]:
        """Gets all tensors in order, `at_once` at a time, and releases each when it has arrived. Returns when it began,
        and when the last had arrived.
        """
        store, began_ns = self._started(), time.monotonic_ns()
        asked: deque[Future[StoredTensor]] = deque()
        wanted = iter(range(len(self._tensors)))
        while True:
            for number in islice(wanted, at_once - len(asked)):
                asked.append(store.get_async(bytes.fromhex(key), number, source=source))
            if not asked:
                return {"began_ns": began_ns, "ended_ns": time.monotonic_ns()}
            with asked.popleft().result() as found:
                if found.description.nbytes != self._tensors[0].nbytes:
                    raise InternalError(Reason.INTERNAL, f"another tensor came for {found.id.name}")

    def check(self, key: str, source: str) -> dict[str, Any]:
        """Returns whether the tensors that arrive equal this process's own: both processes fill alike."""
        store = self._started()
        equal = True
        for number, tensor in enumerate(self._tensors):
            with store.get(bytes.fromhex(key), number, source=source) as found:
                equal &= np.array_equal(found.numpy(), tensor)
        return {"equal": bool(equal)}

    def release(self, key: str) -> dict[str, Any]:
        """Releases the tensors of a request."""
        self._started().release(bytes.fromhex(key))
        return {}

    def _computed(self, tensor: NDArray[np.uint8]) -> NewTensor:
        made = self._started().empty(tensor.shape, tensor.dtype)
        made.numpy()[:] = tensor
        return made

    def _started(self) -> TensorStore:
        if self._store is None:
            raise InternalError(Reason.INTERNAL, "start comes first")
        return self._store
