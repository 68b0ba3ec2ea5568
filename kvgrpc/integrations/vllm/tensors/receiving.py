"""What a worker takes. It asks its store for all tensors of a request at once, and copies each out of the store as it
comes: so the store has room for the next one, whatever else is in it, and may be smaller than a prompt. When the
request has blocks, they are copied into these.

A tensor that is put here may never come. So with it the worker asks the source for one that is never put: this call
ends when the source gives the request up, or dies.
"""

import contextlib
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from kvgrpc.engine.tensors import StoredTensor, TensorStore
from kvgrpc.errors import DeadlineExceeded, NotFound, Reason
from kvgrpc.integrations.vllm.tensors.messages import Expect, Heard, Load
from kvgrpc.integrations.vllm.tensors.options import Send, TensorOptions, address_of
from kvgrpc.integrations.vllm.tensors.parts import Part

IDLE_S = 0.005
"""A step without tokens waits so long for news: vLLM makes one after the other while a request waits for its KV."""
NEVER = "never put"
NEVER_S = 5.0
"""So long each of these calls lasts: at the source it is one of a bounded number."""

Coming = Future[torch.Tensor]


@dataclass(eq=False)
class _Taken:
    """Under one key: for one request, or for several answers to one prompt."""

    key: bytes
    source: str
    parts: dict[Part, list[Coming]] = field(default_factory=dict)
    """Of each part its tensors, layer by layer, in memory of this worker."""
    requests: dict[str, dict[Part, None]] = field(default_factory=dict)
    """What each of them takes."""
    told: dict[str, int] = field(default_factory=dict)
    """Parts of each that the scheduler's side knows to be here."""
    never: Future[StoredTensor] | None = None


class Receiving:
    """One worker's."""

    def __init__(
        self, store: TensorStore, options: TensorOptions, rank: int, caches: Mapping[str, torch.Tensor]
    ) -> None:
        """`caches`: as in Sending."""
        self._store, self._options, self._rank = store, options, rank
        self._caches = caches
        self._taken: dict[bytes, _Taken] = {}
        self._key_of: dict[str, bytes] = {}
        self._news = threading.Event()
        """Something came, or will not."""
        self._copier = ThreadPoolExecutor(1, "kvgrpc-take")

    def expect(self, expect: Expect) -> None:
        """A request takes these parts."""
        source = address_of(expect.source, self._rank) if expect.source else ""
        taken = self._taken.setdefault(expect.key, _Taken(expect.key, source))
        self._key_of[expect.request_id] = expect.key
        wanted = taken.requests.setdefault(expect.request_id, {})
        for part in expect.parts:
            wanted[part] = None
            if part not in taken.parts:
                taken.parts[part] = [self._ask(taken, part, number) for number in range(len(self._caches))]
        self._news.set()  # it may be here already
        if source and self._options.send is not Send.GET:
            self._ask_for_never(taken)

    def _ask(self, taken: _Taken, part: Part, number: int) -> Coming:
        name, cache = list(self._caches.items())[number]
        found = self._store.get_async(
            taken.key, name, part=part.number, source=taken.source if self._options.send is Send.GET else "",
            dtype=str(cache.dtype).removeprefix("torch."), shape=(part.blocks, *cache.shape[1:]), layer=number,
            content_digest=part.content_digest, timeout_s=self._options.timeout_s,
        )  # fmt: skip
        coming: Coming = Future()
        found.add_done_callback(lambda found: self._came(found, coming))
        return coming

    def _came(self, found: Future[StoredTensor], coming: Coming) -> None:
        """In the store's thread."""
        with contextlib.suppress(RuntimeError):  # nobody takes anything any more
            self._copier.submit(self._copy_out, found, coming)

    def _copy_out(self, found: Future[StoredTensor], coming: Coming) -> None:
        try:
            with found.result() as tensor:
                coming.set_result(tensor.torch().clone())
        except BaseException as error:  # noqa: BLE001 - it is the request's
            coming.set_exception(error)
        self._news.set()

    def _ask_for_never(self, taken: _Taken) -> None:
        if taken.never is None:
            taken.never = self._store.get_async(taken.key, NEVER, source=taken.source, timeout_s=NEVER_S)
            taken.never.add_done_callback(lambda _: self._news.set())

    def load(self, load: Load) -> None:
        """Copies into these blocks. Raises what a tensor did not come with; then some may be filled."""
        if load.request_id not in self._key_of:
            raise NotFound(Reason.TRANSFER_NOT_FOUND, "nothing was taken for it")
        taken, end = self._taken[self._key_of[load.request_id]], load.first_block + len(load.blocks)
        for part in taken.requests[load.request_id]:
            first, last = max(part.first_block, load.first_block), min(part.first_block + part.blocks, end)
            if first >= last:
                continue
            skip, blocks = first - part.first_block, load.blocks[first - load.first_block : last - load.first_block]
            for cache, coming in zip(self._caches.values(), taken.parts[part], strict=True):
                rows = coming.result(0.0)[skip : skip + len(blocks)]
                cache.index_copy_(0, torch.tensor(blocks, device=cache.device), rows.to(cache.device))

    def left(self, request_id: str) -> None:
        """It takes nothing any more."""
        key = self._key_of.pop(request_id, None)
        if key is not None and key in self._taken:
            self._taken[key].requests.pop(request_id, None)

    def ended(self, key: bytes) -> None:
        """Nothing is taken under this key any more."""
        self._taken.pop(key, None)

    def wait(self) -> None:
        """For news, but not long."""
        self._news.wait(IDLE_S)

    def hear(self, heard: Heard) -> None:
        """Tells what is here by now, and what will not come."""
        if not self._news.is_set():
            return
        self._news.clear()
        for taken in self._taken.values():
            gone = self._source_is_gone(taken)
            for request_id, parts in taken.requests.items():
                coming = [one for part in parts for one in taken.parts[part]]
                error = next((error for one in coming if one.done() and (error := one.exception()) is not None), None)
                if error is None and all(one.done() for one in coming):
                    if taken.told.get(request_id) != len(parts):
                        taken.told[request_id] = len(parts)
                        heard.held[request_id, len(parts)] += 1
                elif error := error or gone:
                    heard.lost[request_id] = str(error)

    def _source_is_gone(self, taken: _Taken) -> BaseException | None:
        if taken.never is None or not taken.never.done():
            return None
        error = taken.never.exception()
        if not isinstance(error, DeadlineExceeded):
            return error
        taken.never = None
        self._ask_for_never(taken)
        return None

    def close(self) -> None:
        """Takes nothing any more."""
        self._copier.shutdown(wait=False, cancel_futures=True)
