"""TensorStore: the staging store of an engine that moves named tensors."""

import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from kvgrpc.core.tensors.store import PAGE_BYTES, store_layout
from kvgrpc.core.tensors.values import Description, TensorId
from kvgrpc.core.values.layout import PoolKind, PoolLayout
from kvgrpc.engine.engine import Engine
from kvgrpc.engine.rank import Rank
from kvgrpc.engine.tensors.arrays import AnyTensor, Bytes, describe, described_as, read, when_computed
from kvgrpc.engine.tensors.jobs import Call, Job, JobThread, PendingPut
from kvgrpc.engine.tensors.saving import Put, Saving, pages_of
from kvgrpc.engine.tensors.stored import NewTensor, StoredTensor
from kvgrpc.errors import DeadlineExceeded, KVGrpcError, Reason, Unavailable, invalid
from kvgrpc.v1 import common_pb2, tensor_pb2
from kvgrpc.wire.tensors import described, description_to_proto, name_to_proto
from kvgrpc.wire.values import duration

TIMEOUT_S = 120.0
DATA_PATHS = "shm", "cma", "nixl", "cuda_vmm", "collective"
"""Of a store in memory of this process's. By the first one it reads stores in shared memory."""
_REACH = {False: ("cma", "nixl", "collective"), True: ("nixl", "cuda_vmm", "collective")}
"""By which others read such a store: in memory of the host, and on a GPU."""
NAMES_MAX = 1_024
"""Of one ReleaseTensors."""


class TensorStore:
    """Puts tensors into the stores of other engines, and gets those that come into its own. `with` closes."""

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
        self._saving = Saving(engine, self._thread, self._memory)
        self._got: dict[TensorId, _Got] = {}
        """What is asked for, or was got and not released."""
        self._lock = threading.Lock()
        self._released: list[TensorId] = []
        """What was got and is released, of which nobody has been told."""
        self._telling = False
        """There is a job that tells it."""

    @classmethod
    def attach(
        cls, socket_path: str, *, store_bytes: int = 0, page_bytes: int = PAGE_BYTES,
        memory: torch.Tensor | None = None, data_paths: Sequence[str] = DATA_PATHS, **attach: Any,
    ) -> Self:  # fmt: skip
        """Attaches to a running lead with a store of so many bytes of shared memory, or with `memory`, a tensor of
        bytes of the host or of a GPU, which stays where it is until `close`; then this process moves the bytes, by
        `data_paths`, best first. `attach`: weights_revision and engine_id, as in Engine.attach. Raises as that does,
        and InvalidRequest for memory that is no store, or that none of the data paths reaches.
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
        """Starts a lead of the engine's own, as Engine.launch does; it ends with the store. All else as in `attach`."""
        layout, kept = _layout_of(store_bytes, page_bytes, memory, data_paths)
        engine = Engine.launch(pool=layout, kind=PoolKind.SERVER_MANAGED, private_memory=memory is not None, **launch)
        return cls(engine, kept, data_paths=tuple(data_paths))

    @property
    def address(self) -> str:
        """Where other engines put tensors, and fetch them."""
        return self._engine.address

    def empty(self, shape: Sequence[int], dtype: Any, *, timeout_s: float = TIMEOUT_S) -> NewTensor:
        """Memory of this store for a tensor that is to be computed there, and put without a copy; what was there before
        is still in it. `dtype`: numpy's or torch's, or its name. Where the store is full it waits. Raises Exhausted
        (POOL_EXHAUSTED) when it stays so for `timeout_s`, OutOfRange (LIMIT_EXCEEDED), InvalidRequest for what is no
        tensor that can be moved, and Unavailable.
        """
        made: Future[NewTensor] = self._thread.run(
            self._saving.new(described_as(shape, dtype), time.monotonic() + timeout_s)
        )
        try:
            return made.result()
        except BaseException:
            made.add_done_callback(_unwanted)  # it may still come
            raise

    def put(
        self, key: bytes, name: str | int, tensor: AnyTensor | NewTensor, to: Sequence[str] = (), **options: Any
    ) -> None:
        """Returns when all consumers have the tensor, or, without any, when it is kept for those that fetch it. As
        `put_async`; raises what it is refused with.
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
        traceparent: str = "",
    ) -> PendingPut:
        """Puts a tensor, and returns when that is queued. It must not be changed before `wait_for_saved`; and one that
        `empty` made, not any more.

        `key`: the request's transfer key. `name`: unique in the request, with `part`; a number is that of a layer.
        `to`: addresses of the consumers' leads; none: `consumers` engines will fetch it, within `ttl_s`. Where this
        store or that of a consumer is full the put waits, `timeout_s` at most. Raises InvalidRequest for what is no
        tensor that can be moved, or was put before, Exhausted where too many are queued, Unavailable.
        """
        _check_trace(traceparent)
        text, layer = _named(name, layer)
        id_, what = TensorId(key, text, part), _described(tensor, layer, content_digest)
        request = tensor_pb2.PutTensorRequest(
            tensor=name_to_proto(id_), description=description_to_proto(what), request_id=request_id,
            consumers=[common_pb2.PeerAddress(address=address) for address in to],
            consumer_count=0 if to else consumers,
        )  # fmt: skip
        if ttl_s is not None:
            request.ttl.CopyFrom(duration(ttl_s))
        put = Put(tensor, when_computed(tensor), request, what.nbytes, time.monotonic() + timeout_s, traceparent)
        self._saving.put(put)
        return put.pending

    def wait_for_saved(self, timeout_s: float | None = None) -> None:
        """Returns when all tensors that were put before may be changed: they are copied, or never will be. Raises
        DeadlineExceeded (DEADLINE).
        """
        self._saving.wait(timeout_s)

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
        _check_trace(traceparent)
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

    def release_async(
        self, key: bytes, names: Sequence[tuple[str | int, int]] = (), *, source: str = ""
    ) -> "Future[int]":
        """As `release`, without waiting. What is put or got under the key from now on is refused all the same.
        `names`: only these tensors, by name and part; the request goes on. `source`: the address of a lead that keeps
        them for this store, and gives them up, too; the result counts those, and is what that lead refuses, or
        Unavailable (PEER_UNREACHABLE) where it cannot be told. Raises InvalidRequest for what is no name.
        """
        ids = [TensorId(key, _named(name, None)[0], part) for name, part in names]
        return self._thread.run(self._release_all(key, ids, source))

    def close(self) -> None:
        """Ends the session, and with it all tensors; what was got stays readable, and memory of the process's own is at
        rest. Idempotent. Raises InternalError (DATA_PATH_FAILED) where that is not proved: free nothing of it.
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
        """Its lead waits for as long as it may at a time."""
        got = self._got.setdefault(id_, _Got())
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
        what, pages = described(answer.tensor.description), pages_of(answer.pages)
        data, is_view = read(self._memory, pages, self._page_bytes, what.nbytes)
        got.held += 1
        return StoredTensor(id_, what, data, is_view, self._give_back)

    def _give_back(self, id_: TensorId) -> None:
        with self._lock:
            self._released.append(id_)
            idle, self._telling = not self._telling, True
        if idle:
            with suppress(Unavailable):  # of a store that is over nothing is held any more
                self._thread.run(self._release())

    def _release(self) -> Job:
        """Those that were got and are released by now, and meanwhile, as many as there are at a time."""
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
        """Whether its lead is to be told at once: the row is gone then. The last release of a tensor is the one that
        counts, and none while somebody asks for it: the lead may have given it by now, in the pages that a release
        would free.
        """
        got = self._got.get(id_)
        if got is None or got.asked or got.held:
            return False
        del self._got[id_]
        return got.released

    def _tell_released(self, ids: Sequence[TensorId]) -> Job:
        """Of these their lead, if they are over when it is their turn: who asks for one meanwhile has it."""
        of: dict[bytes, list[TensorId]] = {}
        for id_ in ids:
            of.setdefault(id_.key, []).append(id_)
        for key, rows in of.items():
            for start in range(0, len(rows), NAMES_MAX):
                names = [name_to_proto(id_) for id_ in rows[start : start + NAMES_MAX] if self._is_over(id_)]
                if names:
                    with suppress(KVGrpcError):  # the lead's life is over, and with it what was held
                        yield {"release_tensors": tensor_pb2.ReleaseTensorsRequest(transfer_key=key, names=names)}

    def _release_all(self, key: bytes, ids: Sequence[TensorId], source: str) -> Job:
        """All of a request; or, of it, these: also where the source refuses some of them."""
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
class _Got:
    """Gets of one tensor."""

    asked: int = 0
    """Those that are not answered."""
    held: int = 0
    """Those that were answered, and not released."""
    released: bool = False
    """One was, which the lead is not told yet."""


def _layout_of(
    store_bytes: int, page_bytes: int, memory: torch.Tensor | None, data_paths: Sequence[str]
) -> tuple[PoolLayout, torch.Tensor | None]:
    """The pool of a store, and its whole pages of that memory. Raises InvalidRequest."""
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
    """A tensor's name and layer: a number is both."""
    return (name, layer) if isinstance(name, str) else (f"layers.{name}", name if layer is None else layer)


def _check_trace(traceparent: str) -> None:
    """Raises InvalidRequest for one that no message can have."""
    if not traceparent.isascii():
        raise invalid("traceparent", "is ASCII, as W3C's Trace Context says")


def _unwanted(made: "Future[NewTensor]") -> None:
    if made.exception() is None:
        made.result().release()


def _described(tensor: AnyTensor | NewTensor, layer: int | None, content_digest: bytes) -> Description:
    if isinstance(tensor, NewTensor):
        return replace(tensor.description, layer=layer, content_digest=content_digest)
    return describe(tensor, layer, content_digest)
