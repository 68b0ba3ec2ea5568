"""TensorStore: the staging store of an engine that moves named tensors."""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from kvgrpc.core.tensors.store import PAGE_BYTES, pages_for, store_layout
from kvgrpc.core.tensors.values import Description, TensorId
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.engine.engine import Engine
from kvgrpc.engine.rank import Rank
from kvgrpc.engine.tensors.arrays import AnyTensor, Bytes, copy_in, describe, read, when_computed
from kvgrpc.engine.tensors.jobs import Call, Job, JobThread, PendingPut, too_late
from kvgrpc.errors import DeadlineExceeded, Exhausted, KVGrpcError, NotFound, OutOfRange, Reason, Unavailable
from kvgrpc.v1 import common_pb2, pool_pb2, tensor_pb2
from kvgrpc.wire.tensors import described, description_to_proto, name_to_proto
from kvgrpc.wire.values import duration

TIMEOUT_S = 120.0
RETRY_S = 0.1
"""Between two tries to get pages, unless something happens earlier: pages come free with the end of a put."""
QUEUED_MAX = 4_096
"""Tensors that wait to be copied into the store."""
NAMES_MAX = 1_024
"""Of one ReleaseTensors."""


class StoredTensor:
    """A tensor that came, in the store: what `numpy` and `torch` give is good until `release`, as by `with`."""

    def __init__(
        self, id_: TensorId, what: Description, data: Bytes, is_view: bool, release: Callable[[TensorId], None]
    ) -> None:
        self.id, self.description, self.is_view = id_, what, is_view
        """`is_view`: the bytes are those in the store; where its pages did not lie side by side they are a copy."""
        self._data = data
        self._release: Callable[[TensorId], None] | None = release

    def numpy(self) -> NDArray[Any]:
        """As an array, read-only. Raises TypeError for an element type that numpy lacks: use `torch`."""
        array = self._data.view(np.dtype(self.description.dtype)).reshape(self.description.shape)
        array.flags.writeable = False
        return array

    def torch(self) -> torch.Tensor:
        """As a torch tensor on the CPU. Nothing writes into it."""
        return torch.from_numpy(self._data).view(getattr(torch, self.description.dtype)).view(self.description.shape)

    def release(self) -> None:
        """The memory is the store's again. Idempotent."""
        release, self._release = self._release, None
        if release is not None:
            release(self.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class TensorStore:
    """Puts tensors into the stores of other engines, and gets those that come into its own. `with` closes."""

    def __init__(self, engine: Engine) -> None:
        """Use `attach` or `launch`."""
        self._engine = engine
        self._page_bytes = engine.pool.block_bytes(0)
        self._rank = Rank(engine.ticket)
        self._memory = self._rank.memory
        self._thread = JobThread(engine)
        self._lock = threading.Lock()
        self._queue: deque[_Put] = deque()
        """Tensors that are not copied yet, oldest first."""
        self._saving = False
        """There is a job that copies them."""
        self._got: dict[TensorId, _Got] = {}
        """What is asked for, or was got and not released."""

    @classmethod
    def attach(cls, socket_path: str, *, store_bytes: int, page_bytes: int = PAGE_BYTES, **attach: Any) -> Self:
        """Attaches to a running lead with a store of so many bytes. `attach`: weights_revision and engine_id, as in
        Engine.attach. Raises as that does.
        """
        layout = store_layout(store_bytes, page_bytes)
        return cls(Engine.attach(socket_path, pool=layout, kind=PoolKind.SERVER_MANAGED, **attach))

    @classmethod
    def launch(cls, *, store_bytes: int, page_bytes: int = PAGE_BYTES, **launch: Any) -> Self:
        """Starts a lead of the engine's own, as Engine.launch does; it ends with the store."""
        layout = store_layout(store_bytes, page_bytes)
        return cls(Engine.launch(pool=layout, kind=PoolKind.SERVER_MANAGED, **launch))

    @property
    def address(self) -> str:
        """Where other engines put tensors, and fetch them."""
        return self._engine.address

    def put(self, key: bytes, name: str | int, tensor: AnyTensor, to: Sequence[str] = (), **options: Any) -> None:
        """Returns when all consumers have the tensor, or, without any, when it is kept for those that fetch it. As
        `put_async`; raises what it is refused with.
        """
        self.put_async(key, name, tensor, to, **options).result()

    def put_async(  # noqa: PLR0913 - by name, each with a default
        self,
        key: bytes,
        name: str | int,
        tensor: AnyTensor,
        to: Sequence[str] = (),
        *,
        part: int = 0,
        layer: int | None = None,
        content_digest: bytes = b"",
        consumers: int = 1,
        ttl_s: float | None = None,
        timeout_s: float = TIMEOUT_S,
        request_id: str = "",
        traceparent: str = "",
    ) -> PendingPut:
        """Puts a tensor, and returns when that is queued. It must not be changed before `wait_for_saved`.

        `key`: the request's transfer key. `name`: unique in the request, with `part`; a number is that of a layer.
        `to`: addresses of the consumers' leads; none: `consumers` engines will fetch it, within `ttl_s`. Where this
        store or that of a consumer is full the put waits, `timeout_s` at most. Raises InvalidRequest for what is no
        tensor that can be moved, Exhausted where too many are queued, Unavailable.
        """
        text, layer = _named(name, layer)
        id_, what = TensorId(key, text, part), describe(tensor, layer, content_digest)
        request = tensor_pb2.PutTensorRequest(
            tensor=name_to_proto(id_), description=description_to_proto(what), request_id=request_id,
            consumers=[common_pb2.PeerAddress(address=address) for address in to],
            consumer_count=0 if to else consumers,
        )  # fmt: skip
        if ttl_s is not None:
            request.ttl.CopyFrom(duration(ttl_s))
        put = _Put(tensor, when_computed(tensor), request, what.nbytes, time.monotonic() + timeout_s, traceparent)
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
        return put.pending

    def wait_for_saved(self, timeout_s: float | None = None) -> None:
        """Returns when all tensors that were put before may be changed: they are copied, or never will be. Raises
        DeadlineExceeded (DEADLINE).
        """
        with self._lock:
            before = list(self._queue)
        _, left = wait([put.pending.saved for put in before], timeout_s)
        if left:
            raise too_late(f"{len(left)} tensors are not copied yet: this store is full, or waits for the device")

    def get(self, key: bytes, name: str | int, **options: Any) -> StoredTensor:
        """As `get_async`, and waits for it; raises what it ends with."""
        return self.get_async(key, name, **options).result()

    def get_async(  # noqa: PLR0913 - by name, each with a default
        self,
        key: bytes,
        name: str | int,
        *,
        part: int = 0,
        source: str = "",
        dtype: str = "",
        shape: Sequence[int] | None = None,
        layer: int | None = None,
        content_digest: bytes = b"",
        timeout_s: float = TIMEOUT_S,
        request_id: str = "",
        traceparent: str = "",
    ) -> "Future[StoredTensor]":
        """A tensor that was put here, or will be within `timeout_s`; with `source`, an address, it is fetched from
        there. `dtype`, `shape`, `layer` and `content_digest`: what it must be, as far as they are stated.

        Ends with PreconditionFailed (CONTENT_MISMATCH) for another one, (TRANSFER_ENDED, CANCELLED) where the request
        has ended, DeadlineExceeded (DEADLINE) for one that does not come, and what fails to bring it. Raises
        InvalidRequest for an `expected` that none can be, and Unavailable. What is done with the future is done in the
        thread of the store, which it must not hold up.
        """
        text, layer = _named(name, layer)
        expected = tensor_pb2.ExpectedTensor(
            dtype=dtype, shape_sizes=shape or (), scalar=shape is not None and not len(shape), layer=layer,
            content_digest=content_digest,
        )  # fmt: skip
        id_ = TensorId(key, text, part)
        request = tensor_pb2.GetTensorRequest(tensor=name_to_proto(id_), expected=expected, request_id=request_id)
        if source:
            request.source.address = source
        return self._thread.run(self._get(id_, request, time.monotonic() + timeout_s, traceparent))

    def release(self, key: bytes) -> int:
        """A request is over: its tensors are gone, also those that were got and those to come. How many were here."""
        return self.release_async(key).result()

    def release_async(self, key: bytes, names: Sequence[tuple[str | int, int]] = ()) -> "Future[int]":
        """As `release`, without waiting. What is put or got under the key from now on is refused all the same.
        `names`: only these tensors, by name and part; the request goes on. Raises InvalidRequest for what is no name.
        """
        ids = [TensorId(key, _named(name, None)[0], part) for name, part in names]
        return self._thread.run(self._release_all(key, ids))

    def close(self) -> None:
        """Ends the session, and with it all tensors; what was got stays readable. Idempotent."""
        self._thread.close()
        self._rank.close()
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- jobs

    def _save_all(self) -> Job:
        """Copies what is queued into the store, in order, and begins to send each."""
        while True:
            with self._lock:
                if not self._queue:
                    self._saving = False
                    return
                put = self._queue[0]
            try:
                allocation_id, pages = yield from self._allocate(put)
                put.computed()
                copy_in(put.tensor, self._memory, pages, self._page_bytes)
                self._thread.run(self._send(put, allocation_id), put.pending.future)
            except Exception as error:  # noqa: BLE001 - it is the caller's
                put.pending.future.set_exception(error)
            with self._lock:
                self._queue.popleft()
            put.pending.saved.set_result(None)

    def _saved_all(self, saver: "Future[None]") -> None:
        """The job that copies is over; what is queued then, because the store is, never will be copied."""
        error = saver.exception()
        if error is not None:
            self._fail_all(error)

    def _fail_all(self, error: BaseException) -> None:
        """What is queued, by whatever thread, never will be copied."""
        with self._lock:
            left, self._queue, self._saving = self._queue, deque(), False
        for put in left:
            put.pending.saved.set_result(None)
            put.pending.future.set_exception(error)

    def _allocate(self, put: "_Put") -> Generator[Call | float, Any, tuple[str, list[int]]]:
        pages = pages_for(put.nbytes, self._page_bytes)
        if pages > self._engine.pool.groups[0].blocks:
            raise OutOfRange(
                Reason.LIMIT_EXCEEDED, f"the tensor takes {pages} pages; this store has fewer: put it in several parts"
            )
        counts = [pool_pb2.GroupBlockCount(group=0, block_count=pages)]
        while True:
            try:
                answer = yield {"allocate_blocks": pool_pb2.AllocateBlocksRequest(group_block_counts=counts)}
            except Exhausted:
                if time.monotonic() + RETRY_S > put.deadline:
                    raise
            else:
                blocks = answer.allocate_blocks.blocks
                return blocks.allocation_id, _pages(blocks)
            yield RETRY_S

    def _send(self, put: "_Put", allocation_id: str) -> Job:
        request = put.request
        request.allocation_id = allocation_id
        request.timeout.CopyFrom(duration(max(put.deadline - time.monotonic(), 1e-3)))
        try:
            yield {"put_tensor": request, "traceparent": put.traceparent}
        except KVGrpcError:
            with suppress(NotFound):  # it belongs to a hand-over already
                yield {"free_blocks": pool_pb2.FreeBlocksRequest(allocation_id=allocation_id)}
            raise

    def _get(self, id_: TensorId, request: tensor_pb2.GetTensorRequest, deadline: float, trace: str) -> Job:
        """Its lead waits for as long as it may at a time."""
        got = self._got.setdefault(id_, _Got())
        got.asked += 1
        try:
            answer = yield from self._ask(request, deadline, trace)
        except KVGrpcError:
            got.asked -= 1
            yield from self._release_if_over(id_, got)
            raise
        got.asked -= 1
        return self._found(id_, got, answer)

    def _ask(
        self, request: tensor_pb2.GetTensorRequest, deadline: float, trace: str
    ) -> Generator[Call | float, Any, tensor_pb2.GetTensorResponse]:
        while True:
            left_s = max(deadline - time.monotonic(), 1e-3)
            request.timeout.CopyFrom(duration(left_s))
            try:
                answer = yield {"get_tensor": request, "traceparent": trace}
            except DeadlineExceeded as error:
                if error.reason is not Reason.DEADLINE or left_s <= self._engine.limits.wait_s:
                    raise
            else:
                reply: tensor_pb2.GetTensorResponse = answer.get_tensor
                return reply

    def _found(self, id_: TensorId, got: "_Got", answer: tensor_pb2.GetTensorResponse) -> StoredTensor:
        what, pages = described(answer.tensor.description), _pages(answer.pages)
        data, is_view = read(self._memory, pages, self._page_bytes, what.nbytes)
        got.held += 1
        return StoredTensor(id_, what, data, is_view, self._give_back)

    def _give_back(self, id_: TensorId) -> None:
        with suppress(Unavailable):  # of a store that is over nothing is held any more
            self._thread.run(self._release(id_))

    def _release(self, id_: TensorId) -> Job:
        """One that was got."""
        got = self._got.get(id_)
        if got is not None:
            got.held -= 1
            got.released = True
            yield from self._release_if_over(id_, got)

    def _release_if_over(self, id_: TensorId, got: "_Got") -> Job:
        """The last release of a tensor is the one that counts, and none while somebody asks for it: the lead may have
        given it by now, in the pages that a release would free.
        """
        if got.asked or got.held or self._got.get(id_) is not got:
            return
        del self._got[id_]
        if got.released:
            names = [name_to_proto(id_)]
            yield {"release_tensors": tensor_pb2.ReleaseTensorsRequest(transfer_key=id_.key, names=names)}

    def _release_all(self, key: bytes, ids: Sequence[TensorId]) -> Job:
        """All of a request; or, of it, these."""
        for id_ in ids or [id_ for id_ in self._got if id_.key == key]:
            self._got.pop(id_, None)
        count = 0
        for start in range(0, max(len(ids), 1), NAMES_MAX):
            names = [name_to_proto(id_) for id_ in ids[start : start + NAMES_MAX]]
            request = tensor_pb2.ReleaseTensorsRequest(transfer_key=key, names=names)
            answer = yield {"release_tensors": request}
            count += answer.release_tensors.released_count
        return count


@dataclass(eq=False)
class _Got:
    """Gets of one tensor."""

    asked: int = 0
    """Those that are not answered."""
    held: int = 0
    """Those that were answered, and not released."""
    released: bool = False
    """One was, which the lead is not told yet."""


@dataclass(eq=False)
class _Put:
    """A tensor that waits to be copied into the store."""

    tensor: AnyTensor
    computed: Callable[[], None]
    """Waits until its device has computed it."""
    request: tensor_pb2.PutTensorRequest
    nbytes: int
    deadline: float
    traceparent: str
    pending: PendingPut = field(default_factory=PendingPut)


def _named(name: str | int, layer: int | None) -> tuple[str, int | None]:
    """A tensor's name and layer: a number is both."""
    return (name, layer) if isinstance(name, str) else (f"layers.{name}", name if layer is None else layer)


def _pages(blocks: common_pb2.Blocks) -> list[int]:
    runs = blocks.groups[0].runs
    return [start + i for start, count in zip(runs.starts, runs.counts, strict=True) for i in range(count)]
