"""TensorStore: the staging store of an engine that moves named tensors."""

import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from kvgrpc.core.tensors.descriptions import Description, TensorId
from kvgrpc.core.tensors.store_layout import PAGE_BYTES, store_layout
from kvgrpc.core.values.layout import PoolKind, PoolLayout
from kvgrpc.engine.engine import Engine
from kvgrpc.engine.rank import Rank
from kvgrpc.engine.tensors.arrays import AnyTensor, Bytes, describe, described_as, read, when_computed
from kvgrpc.engine.tensors.jobs import Job, JobThread, PendingPut, SessionCall
from kvgrpc.engine.tensors.puts import QueuedPut, StorePuts, pages_of
from kvgrpc.engine.tensors.stored import NewTensor, StoredTensor
from kvgrpc.errors import DeadlineExceeded, KVGrpcError, Reason, Unavailable, invalid
from kvgrpc.v1 import common_pb2, tensor_pb2
from kvgrpc.wire.tensors import described, description_to_proto, name_to_proto
from kvgrpc.wire.values import duration

TIMEOUT_S = 120.0
DATA_PATHS = "shm", "cma", "nixl", "cuda_vmm", "collective"
"""Default data paths of a store in memory of this process, best first. `shm` reads stores in shared memory."""
_REACH = {False: ("cma", "nixl", "collective"), True: ("nixl", "cuda_vmm", "collective")}
"""Data paths over which others read such a store: False -> in host memory, True -> on a GPU."""
NAMES_MAX = 1_024
"""Maximum number of names in one ReleaseTensors."""


class TensorStore:
    """A staging store: puts tensors into other engines' stores, and gets what comes here. Leaving `with` closes it."""

    def __init__(self, engine: Engine, memory: torch.Tensor | None = None, **rank: Any) -> None:
        """Use `attach` or `launch`."""
        self._engine = engine
        self._page_bytes = engine.pool.block_bytes(0)
        try:
            self._rank = Rank(engine.ticket, tensors=[] if memory is None else [memory], **rank)
        except BaseException:
            engine.close()
            raise
        self._memory: Bytes = self._rank.memory if memory is None else memory
        self._thread = JobThread(engine)
        self._puts = StorePuts(engine, self._thread, self._memory)
        self._got: dict[TensorId, _TensorGets] = {}
        """Gets in flight and unreleased tensors, by name."""
        self._lock = threading.Lock()
        self._released: list[TensorId] = []
        """Released tensors of which the lead has not been told."""
        self._telling = False
        """True while a job tells the lead."""

    @classmethod
    def attach(
        cls, socket_path: str, *, store_bytes: int = 0, page_bytes: int = PAGE_BYTES,
        memory: torch.Tensor | None = None, data_paths: Sequence[str] = DATA_PATHS, **attach: Any,
    ) -> Self:  # fmt: skip
        """Attaches to a running lead with a store of `store_bytes` bytes of shared memory, or with `memory`: a tensor
        of bytes of the host or of a GPU, which must stay in place until `close`. This process moves the bytes of
        `memory`, over `data_paths`, best first. `attach`: weights_revision and engine_id, as in Engine.attach. Raises
        its errors, and InvalidRequest for memory that is no store, or that none of the data paths reaches.
        """
        layout, kept = _layout_of(store_bytes, page_bytes, memory, data_paths)
        engine = Engine.attach(
            socket_path, pool=layout, kind=PoolKind.SERVER_MANAGED, private_memory=memory is not None, **attach
        )
        return cls(engine, kept, data_paths=tuple(data_paths))

    @classmethod
    def launch(
        cls, *, store_bytes: int = 0, page_bytes: int = PAGE_BYTES, memory: torch.Tensor | None = None,
        data_paths: Sequence[str] = DATA_PATHS, **launch: Any,
    ) -> Self:  # fmt: skip
        """Starts a lead for this store, as Engine.launch does, and ends it with the store. All else as in `attach`."""
        layout, kept = _layout_of(store_bytes, page_bytes, memory, data_paths)
        engine = Engine.launch(pool=layout, kind=PoolKind.SERVER_MANAGED, private_memory=memory is not None, **launch)
        return cls(engine, kept, data_paths=tuple(data_paths))

    @property
    def address(self) -> str:
        """Address at which other engines put tensors, and fetch them."""
        return self._engine.address

    def empty(self, shape: Sequence[int], dtype: Any, *, timeout_s: float = TIMEOUT_S) -> NewTensor:
        """Returns memory of this store, not cleared, for a tensor that is computed there and put without a copy.
        `dtype`: a type of numpy or torch, or its name. Waits for room if the store is full. Raises Exhausted
        (POOL_EXHAUSTED) after `timeout_s` without room, OutOfRange (LIMIT_EXCEEDED) if the store is too small,
        InvalidRequest for a tensor that cannot be moved, and Unavailable.
        """
        made: Future[NewTensor] = self._thread.run(
            self._puts.new(described_as(shape, dtype), time.monotonic() + timeout_s)
        )
        try:
            return made.result()
        except BaseException:
            made.add_done_callback(_unwanted)  # the pages may still come
            raise

    def put(
        self, key: bytes, name: str | int, tensor: AnyTensor | NewTensor, to: Sequence[str] = (), **options: Any
    ) -> None:
        """Puts a tensor as `put_async` does. Returns when all consumers have it, or, without consumers, when it is kept
        for those that fetch it. Raises the error of a refused put.
        """
        self.put_async(key, name, tensor, to, **options).result()

    def put_async(  # noqa: PLR0913 - by name, each with a default
        self,
        key: bytes,
        name: str | int,
        tensor: AnyTensor | NewTensor,
        to: Sequence[str] = (),
        *,
        part: int = 0,
        layer: int | None = None,
        content_digest: bytes = b"",
        consumers: int = 1,
        ttl_s: float | None = None,
        timeout_s: float = TIMEOUT_S,
        request_id: str = "",
        tenant: str = "",
        traceparent: str = "",
    ) -> PendingPut:
        """Queues a put and returns. The tensor must not be changed before `wait_for_saved` returns. A tensor that
        `empty` made belongs to the store from now on.

        `key`: the request's transfer key. `name`: unique in the request together with `part`; a number names a layer.
        `to`: addresses of the consumers' leads; none: `consumers` engines fetch the tensor within `ttl_s`. The put
        waits up to `timeout_s` if this store or a consumer's is full. `tenant`: whose the tensor is; to callers of
        another tenant it is unknown. Raises InvalidRequest for an invalid name, a tensor that cannot be moved, or a
        NewTensor that was put or released; Exhausted (QUEUE_FULL); Unavailable.
        """
        _check_trace(traceparent)
        text, layer = _named(name, layer)
        id_, what = TensorId(key, text, part), _described(tensor, layer, content_digest)
        leads, count = [common_pb2.PeerAddress(address=address) for address in to], 0 if to else consumers
        request = tensor_pb2.PutTensorRequest(tensor=name_to_proto(id_), description=description_to_proto(what))
        request.consumers.extend(leads)
        request.consumer_count, request.request_id, request.tenant = count, request_id, tenant
        if ttl_s is not None:
            request.ttl.CopyFrom(duration(ttl_s))
        put = QueuedPut(tensor, when_computed(tensor), request, what.nbytes, time.monotonic() + timeout_s, traceparent)
        self._puts.put(put)
        return put.pending

    def wait_for_saved(self, timeout_s: float | None = None) -> None:
        """Returns when all tensors put before may be changed: they are copied, or never will be. Raises
        DeadlineExceeded (DEADLINE) after `timeout_s`.
        """
        self._puts.wait(timeout_s)

    def get(self, key: bytes, name: str | int, **options: Any) -> StoredTensor:
        """Returns the tensor that `get_async` brings. Raises the error that its future ends with."""
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
        """Returns the future of a tensor that was put here, or is put within `timeout_s`. With `source`, the address of
        a lead, the tensor is fetched from there. `dtype`, `shape`, `layer` and `content_digest`: expected values; those
        left out are not compared.

        The future ends with PreconditionFailed: CONTENT_MISMATCH for another tensor, TRANSFER_ENDED or CANCELLED if the
        request has ended; with DeadlineExceeded (DEADLINE) for a tensor that does not come; or with another error of
        the lead. Raises InvalidRequest for an invalid name, and Unavailable. Callbacks of the future run in the store's
        thread and must not block it.
        """
        _check_trace(traceparent)
        text, layer = _named(name, layer)
        scalar = shape is not None and not len(shape)
        expected = tensor_pb2.ExpectedTensor(
            dtype=dtype, shape_sizes=shape or (), scalar=scalar, layer=layer, content_digest=content_digest
        )
        id_ = TensorId(key, text, part)
        request = tensor_pb2.GetTensorRequest(tensor=name_to_proto(id_), expected=expected, request_id=request_id)
        if source:
            request.source.address = source
        return self._thread.run(self._get(id_, request, time.monotonic() + timeout_s, traceparent))

    def release(self, key: bytes) -> int:
        """Frees a request's tensors, also those that were got, and refuses later ones. Returns how many were freed."""
        return self.release_async(key).result()

    def release_async(
        self, key: bytes, names: Sequence[tuple[str | int, int]] = (), *, source: str = ""
    ) -> "Future[int]":
        """Ends a request as `release` does, without waiting: later puts and gets under the key are refused at once.
        `names`: release only these tensors, by name and part; the request goes on. `source`: address of a lead that
        keeps them for this store, and also gives them up. The result counts these too. The future ends with that lead's
        error, or with Unavailable (PEER_UNREACHABLE) if the lead is not reached. Raises InvalidRequest for a bad name.
        """
        ids = [TensorId(key, _named(name, None)[0], part) for name, part in names]
        return self._thread.run(self._release_all(key, ids, source))

    def close(self) -> None:
        """Ends the session, and with it all tensors. Tensors that were got stay readable. Memory of this process is at
        rest. Idempotent. Raises InternalError (DATA_PATH_FAILED) if that is not proved: do not free the memory then.
        """
        self._thread.close()
        try:
            self._rank.close()
        finally:
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- jobs

    def _get(self, id_: TensorId, request: tensor_pb2.GetTensorRequest, deadline: float, trace: str) -> Job:
        """Gets a tensor. A failed get tells the lead of a release that was held back while the get was in flight."""
        got = self._got.setdefault(id_, _TensorGets())
        got.asked += 1
        try:
            answer = yield from self._ask(request, deadline, trace)
        except KVGrpcError:
            got.asked -= 1
            yield from self._tell_released([id_])
            raise
        got.asked -= 1
        return self._found(id_, got, answer)

    def _ask(
        self, request: tensor_pb2.GetTensorRequest, deadline: float, trace: str
    ) -> Generator[SessionCall | float, Any, tensor_pb2.GetTensorResponse]:
        """Asks the lead again until the deadline: one call waits there for `limits.wait_s` at most."""
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

    def _found(self, id_: TensorId, got: "_TensorGets", answer: tensor_pb2.GetTensorResponse) -> StoredTensor:
        what, pages = described(answer.tensor.description), pages_of(answer.pages)
        data, is_view = read(self._memory, pages, self._page_bytes, what.nbytes)
        got.held += 1
        return StoredTensor(id_, what, data, is_view, self._give_back)

    def _give_back(self, id_: TensorId) -> None:
        with self._lock:
            self._released.append(id_)
            idle, self._telling = not self._telling, True
        if idle:
            with suppress(Unavailable):  # a closed or lost store holds no tensors
                self._thread.run(self._release())

    def _release(self) -> Job:
        """Tells the lead of all released tensors, and then of those released meanwhile."""
        try:
            while True:
                with self._lock:
                    released, self._released = self._released, []
                    self._telling = bool(released)
                if not released:
                    return
                for id_ in released:
                    if (got := self._got.get(id_)) is not None:
                        got.held -= 1
                        got.released = True
                yield from self._tell_released(released)
        except BaseException:
            with self._lock:
                self._telling = False
            raise

    def _is_over(self, id_: TensorId) -> bool:
        """Returns whether the lead is to be told of a tensor's release now. Forgets a tensor that no get asks for or
        holds. Only the last release counts. No release counts while a get is in flight: the lead may have answered that
        get already, with the pages that the release would free.
        """
        got = self._got.get(id_)
        if got is None or got.asked or got.held:
            return False
        del self._got[id_]
        return got.released

    def _tell_released(self, ids: Sequence[TensorId]) -> Job:
        """Tells the lead of released tensors. Each is checked just before its call: a get may have begun meanwhile."""
        of: dict[bytes, list[TensorId]] = {}
        for id_ in ids:
            of.setdefault(id_.key, []).append(id_)
        for key, rows in of.items():
            for start in range(0, len(rows), NAMES_MAX):
                names = [name_to_proto(id_) for id_ in rows[start : start + NAMES_MAX] if self._is_over(id_)]
                if names:
                    with suppress(KVGrpcError):  # a lead that is gone holds no tensors
                        yield {"release_tensors": tensor_pb2.ReleaseTensorsRequest(transfer_key=key, names=names)}

    def _release_all(self, key: bytes, ids: Sequence[TensorId], source: str) -> Job:
        """Releases all tensors of a request, or only `ids`. All batches are sent, also after one that is refused."""
        for id_ in ids or [id_ for id_ in self._got if id_.key == key]:
            self._got.pop(id_, None)
        count, refused = 0, None
        for start in range(0, max(len(ids), 1), NAMES_MAX):
            names = [name_to_proto(id_) for id_ in ids[start : start + NAMES_MAX]]
            request = tensor_pb2.ReleaseTensorsRequest(transfer_key=key, names=names)
            if source:
                request.source.address = source
            try:
                answer = yield {"release_tensors": request}
            except KVGrpcError as error:
                refused = refused or error
            else:
                count += answer.release_tensors.released_count + answer.release_tensors.source_released_count
        if refused is not None:
            raise refused
        return count


@dataclass(eq=False)
class _TensorGets:
    """The gets of one tensor."""

    asked: int = 0
    """Number of gets in flight."""
    held: int = 0
    """Number of results that are not released."""
    released: bool = False
    """True after a release of which the lead has not been told."""


def _layout_of(
    store_bytes: int, page_bytes: int, memory: torch.Tensor | None, data_paths: Sequence[str]
) -> tuple[PoolLayout, torch.Tensor | None]:
    """Returns the pool of a store, and the whole pages of `memory`. Raises InvalidRequest."""
    if memory is None:
        return store_layout(store_bytes, page_bytes), None
    if store_bytes:
        raise invalid("store_bytes", "is the size of shared memory: `memory` has its own")
    if memory.dtype is not torch.uint8 or memory.dim() != 1 or memory.device.type not in ("cpu", "cuda"):
        raise invalid("memory", "is a tensor of bytes, of one dimension, of the host or of a GPU of CUDA")
    layout = store_layout(len(memory), page_bytes)
    reach = _REACH[memory.is_cuda]
    if not set(reach) & set(data_paths):
        where = "of a GPU" if memory.is_cuda else "of this process alone"
        raise invalid("data_paths", f"memory {where} is reached by {', '.join(reach)}: have one of them")
    return layout, memory[: layout.total_bytes]


def _named(name: str | int, layer: int | None) -> tuple[str, int | None]:
    """Returns a tensor's name and layer. A number gives both."""
    return (name, layer) if isinstance(name, str) else (f"layers.{name}", name if layer is None else layer)


def _check_trace(traceparent: str) -> None:
    """Raises InvalidRequest for a trace context that no message can carry."""
    if not traceparent.isascii():
        raise invalid("traceparent", "is ASCII, as W3C's Trace Context says")


def _unwanted(made: "Future[NewTensor]") -> None:
    if made.exception() is None:
        made.result().release()


def _described(tensor: AnyTensor | NewTensor, layer: int | None, content_digest: bytes) -> Description:
    if isinstance(tensor, NewTensor):
        return replace(tensor.description, layer=layer, content_digest=content_digest)
    return describe(tensor, layer, content_digest)
