"""The puts of a store: tensors are copied into its pages in the order of their puts, and each is sent once copied."""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from kvgrpc.core.tensors.descriptions import Description
from kvgrpc.core.tensors.store_layout import pages_for
from kvgrpc.engine.engine import Engine
from kvgrpc.engine.tensors.arrays import AnyTensor, Bytes, copy_in, room
from kvgrpc.engine.tensors.jobs import Job, JobThread, PendingPut, SessionCall, too_late
from kvgrpc.engine.tensors.stored import NewTensor
from kvgrpc.errors import Exhausted, KVGrpcError, NotFound, OutOfRange, Reason, Unavailable
from kvgrpc.v1 import common_pb2, pool_pb2, tensor_pb2
from kvgrpc.wire.values import duration

RETRY_S = 0.02
"""Delay between tries to get pages, in seconds. The end of a job shortens it, since the end of a put frees pages. Pages
also come free without a job, when a consumer has fetched a tensor.
"""
QUEUED_MAX = 4_096
"""Maximum number of tensors that wait to be copied into the store."""


@dataclass(eq=False)
class QueuedPut:
    """A tensor that is being put."""

    tensor: AnyTensor | NewTensor | None
    """None once it is copied, or never will be."""
    computed: Callable[[], None]
    """Function that waits until its device has computed it."""
    request: tensor_pb2.PutTensorRequest
    nbytes: int
    deadline: float
    traceparent: str
    pending: PendingPut = field(default_factory=PendingPut)


class StorePuts:
    """The puts of one store."""

    def __init__(self, engine: Engine, thread: JobThread, memory: Bytes) -> None:
        self._engine, self._thread, self._memory = engine, thread, memory
        self._page_bytes = engine.pool.block_bytes(0)
        self._lock = threading.Lock()
        self._queue: deque[QueuedPut] = deque()
        """Tensors that are not copied yet, oldest first."""
        self._saving = False
        """True while a job copies them."""

    def put(self, put: QueuedPut) -> None:
        """Queues a put. A tensor that lies in the store is sent at once, and does not wait for others without room.
        Raises Exhausted (QUEUE_FULL), Unavailable, and InvalidRequest for a NewTensor of another store, or one that was
        put before or released.
        """
        if isinstance(put.tensor, NewTensor):
            data = put.tensor.take(self._give_back)
            self._thread.run(self._send_new(put.tensor, data, put), put.pending.future)
            put.pending.saved.set_result(None)
            return
        with self._lock:
            if len(self._queue) >= QUEUED_MAX:
                raise Exhausted(Reason.QUEUE_FULL, f"{QUEUED_MAX} tensors wait to be copied", retry_delay_s=RETRY_S)
            self._queue.append(put)
            idle, self._saving = not self._saving, True
        if idle:
            try:
                self._thread.run(self._save_all()).add_done_callback(self._saved_all)
            except KVGrpcError as error:
                self._fail_all(error)
                raise

    def wait(self, timeout_s: float | None) -> None:
        """Returns when all tensors put before are copied, or never will be. Raises DeadlineExceeded (DEADLINE)."""
        with self._lock:
            before = list(self._queue)
        _, left = wait([put.pending.saved for put in before], timeout_s)
        if left:
            raise too_late(f"{len(left)} tensors are not copied yet: this store is full, or waits for the device")

    def new(self, what: Description, deadline: float) -> Generator[SessionCall | float, Any, NewTensor]:
        """Waits for pages, and returns a tensor to compute in them. Raises Exhausted (POOL_EXHAUSTED), OutOfRange."""
        allocation_id, pages = yield from self._allocate(what.nbytes, deadline)
        with self._kept(allocation_id):
            data, is_view = room(self._memory, pages, self._page_bytes, what.nbytes)
            return NewTensor(what, allocation_id, pages, data, is_view, self._give_back)

    # -- jobs

    def _save_all(self) -> Job:
        """Copies the queued tensors into the store, in order, and begins to send each."""
        while True:
            with self._lock:
                if not self._queue:
                    self._saving = False
                    return
                put = self._queue[0]
            try:
                allocation_id, pages = yield from self._allocate(put.nbytes, put.deadline, put.pending.full)
                with self._kept(allocation_id):
                    put.computed()
                    copy_in(put.tensor, self._memory, pages, self._page_bytes)
                self._thread.run(self._send(put, allocation_id), put.pending.future)
            except Exception as error:  # noqa: BLE001 - the caller gets it
                put.pending.future.set_exception(error)
            with self._lock:
                self._queue.popleft()
            put.tensor = None  # the job that sends it must not keep memory of the engine
            put.pending.saved.set_result(None)

    def _saved_all(self, saver: "Future[None]") -> None:
        """Fails the queued tensors if the job that copies them failed: the store is closed, or its lead gone."""
        error = saver.exception()
        if error is not None:
            self._fail_all(error)

    def _fail_all(self, error: BaseException) -> None:
        """Fails all queued tensors: they never will be copied."""
        with self._lock:
            left, self._queue, self._saving = self._queue, deque(), False
        for put in left:
            put.pending.saved.set_result(None)
            put.pending.future.set_exception(error)

    def _allocate(
        self, nbytes: int, deadline: float, full: "Future[None] | None" = None
    ) -> Generator[SessionCall | float, Any, tuple[str, list[int]]]:
        pages = pages_for(nbytes, self._page_bytes)
        if pages > self._engine.pool.groups[0].blocks:
            raise OutOfRange(
                Reason.LIMIT_EXCEEDED, f"the tensor takes {pages} pages; this store has fewer: put it in several parts"
            )
        request = pool_pb2.AllocateBlocksRequest()
        request.group_block_counts.add(group=0, block_count=pages)
        while True:
            try:
                answer = yield {"allocate_blocks": request}
            except Exhausted:
                if time.monotonic() + RETRY_S > deadline:
                    raise
                if full is not None and not full.done():
                    full.set_result(None)
            else:
                blocks = answer.allocate_blocks.blocks
                return blocks.allocation_id, pages_of(blocks)
            yield RETRY_S

    def _send(self, put: QueuedPut, allocation_id: str) -> Job:
        request = put.request
        request.allocation_id = allocation_id
        request.timeout.CopyFrom(duration(max(put.deadline - time.monotonic(), 1e-3)))
        try:
            yield {"put_tensor": request, "traceparent": put.traceparent}
        except KVGrpcError:
            yield from self._free(allocation_id)
            raise

    def _send_new(self, new: NewTensor, data: Bytes, put: QueuedPut) -> Job:
        """Sends a tensor that lies in the store. It is copied there first if its pages do not lie side by side."""
        if not new.is_view:
            with self._kept(new.allocation_id):
                copy_in(data, self._memory, new.pages, self._page_bytes)
        yield from self._send(put, new.allocation_id)

    @contextmanager
    def _kept(self, allocation_id: str) -> Iterator[None]:
        """Frees the allocation if the body fails."""
        try:
            yield
        except BaseException:
            self._give_back(allocation_id)
            raise

    def _give_back(self, allocation_id: str) -> None:
        with suppress(Unavailable):  # a closed or lost store holds no pages
            self._thread.run(self._free(allocation_id))

    @staticmethod
    def _free(allocation_id: str) -> Job:
        with suppress(NotFound):  # the hand-over owns it and frees it
            yield {"free_blocks": pool_pb2.FreeBlocksRequest(allocation_id=allocation_id)}


def pages_of(blocks: common_pb2.Blocks) -> list[int]:
    """Returns the pages of an allocation, in order."""
    runs = blocks.groups[0].runs
    return [start + i for start, count in zip(runs.starts, runs.counts, strict=True) for i in range(count)]
