"""The tensors that a worker takes. The worker asks its store for all tensors of a request, and copies each out of the
store as it comes. So the store has room for the next tensor, and may be smaller than a prompt. Once the request has
blocks, the copies are copied into the blocks.

A tensor may never come. So when a request arrives, the worker asks the source for a tensor that is never put. This call
ends when the source gives the request up, or dies. Until then both leads renew the request's tensors, within their
limits, while it is in vLLM's queue. A tensor that is to be put here, and does not come within the first call, is asked
of the source: a prefill engine that was told of no consumer keeps it.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kvgrpc.core.values.ids import request_label
from kvgrpc.engine.tensors import TensorStore
from kvgrpc.errors import KVGrpcError, NotFound, Reason
from kvgrpc.integrations.vllm.tensors.asker import TensorAsk, TensorAsker
from kvgrpc.integrations.vllm.tensors.messages import ExpectTask, LoadTask, WorkerNews, loss_of
from kvgrpc.integrations.vllm.tensors.options import TensorOptions, address_of
from kvgrpc.integrations.vllm.tensors.parts import PromptPart
from kvgrpc.integrations.vllm.tensors.stacks import Stack, stacks

IDLE_S = 0.005
"""Maximum time that a step without tokens waits for news, in seconds: vLLM repeats such steps while a request waits."""
NEVER = "never put"
WATCHES_MAX = 256
"""Maximum number of calls for `NEVER` in flight. With more keys each has its turn."""


@dataclass(eq=False)
class _AwaitedPart:
    """A part that is coming."""

    tensors: list[torch.Tensor | None]
    """The tensor of each stack, in memory of this worker. None: it is not here yet."""
    lacks: int
    """Number of tensors that are not here yet."""
    error: KVGrpcError | None = None
    """Error of a tensor that will not come."""


@dataclass(eq=False)
class _TakingRequest:
    """A request that takes."""

    parts: dict[PromptPart, None] = field(default_factory=dict)
    """Parts that it takes, in order."""
    told: int = 0
    """Number of parts that were here when the scheduler's side was last told."""


@dataclass(eq=False)
class _TakenParts:
    """The parts taken under one key, for one request or for several answers to one prompt."""

    key: bytes
    source: str
    """Address of this rank's source; empty: unknown."""
    fetches: bool
    """True if the source keeps the tensors. False if it puts them here."""
    parts: dict[PromptPart, _AwaitedPart] = field(default_factory=dict)
    requests: dict[str, _TakingRequest] = field(default_factory=dict)
    let_go: int = 0
    """Number of leading parts that are refused."""
    gone: KVGrpcError | None = None
    """Reason why the source puts nothing more. None while it may."""
    ended: bool = False


class TensorTaker:
    """The taking side of one worker."""

    def __init__(
        self, store: TensorStore, options: TensorOptions, rank: int, caches: Mapping[str, torch.Tensor]
    ) -> None:
        """`caches`: see TensorPutter."""
        self._store, self._options, self._rank = store, options, rank
        self._caches, self._stacks = caches, stacks(caches, options.layers_per_tensor)
        self._taken: dict[bytes, _TakenParts] = {}
        self._key_of: dict[str, bytes] = {}
        self._changed: deque[_TakenParts] = deque()
        """Keys with news of which the scheduler's side does not know: something came, or will not."""
        self._news = threading.Event()
        """Set while there is news."""
        self._asker, self._watcher = TensorAsker(store), TensorAsker(store, WATCHES_MAX)

    def expect(self, expect: ExpectTask) -> None:
        """Asks for the parts of a request, for `timeout_s` at most. Without parts the request will take some later, and
        only the source is watched. Raises Unavailable.
        """
        source = address_of(expect.source, self._rank) if expect.source else ""
        taken = self._taken.get(expect.key)
        asks = []
        if taken is None:
            taken = self._taken[expect.key] = _TakenParts(expect.key, source, expect.fetches)
            if source:
                self._watcher.ask([self._ask_for_never(taken)])
        self._let_go(taken, expect.let_go)
        self._key_of[expect.request_id] = expect.key
        request = taken.requests.setdefault(expect.request_id, _TakingRequest())
        until = time.monotonic() + self._options.timeout_s
        for part in expect.parts:
            request.parts[part] = None
            if part not in taken.parts:
                coming = taken.parts[part] = _AwaitedPart([None] * len(self._stacks), len(self._stacks))
                asks += [self._ask(taken, part, coming, stack, until, expect) for stack in enumerate(self._stacks)]
        self._asker.ask(asks)
        self._change(taken)  # its parts may be here already

    def _let_go(self, taken: _TakenParts, parts: int) -> None:
        """Refuses the leading parts of the prompt, so that no put waits for room for them."""
        names = [(s.name(self._rank), part) for part in range(taken.let_go, parts) for s in self._stacks]
        taken.let_go = max(taken.let_go, parts)
        if names:
            self._store.release_async(taken.key, names)

    def _ask(
        self,
        taken: _TakenParts,
        part: PromptPart,
        coming: _AwaitedPart,
        numbered: tuple[int, Stack],
        until: float,
        expect: ExpectTask,
    ) -> TensorAsk:
        """Returns the request for the tensor of one stack. `numbered`: the stack with its index in `_stacks`."""
        number, stack = numbered
        cache = self._caches[stack.layers[0]]
        more = {
            "part": part.number, "dtype": str(cache.dtype).removeprefix("torch."), "layer": stack.number,
            "shape": (len(stack.layers), part.blocks, *cache.shape[1:]), "content_digest": part.content_digest,
            "request_id": request_label(expect.label or expect.request_id), "traceparent": expect.traceparent,
        }  # fmt: skip
        source = {"source": taken.source} if taken.source else {}

        def over(tensor: torch.Tensor | None, error: KVGrpcError | None) -> None:
            """Runs in the thread of TensorAsker."""
            if tensor is not None:
                coming.tensors[number] = tensor
                coming.lacks -= 1
            coming.error = coming.error or error
            if error is not None or not coming.lacks:
                self._change(taken)

        first, later = (more | source if taken.fetches else more), more | source
        return TensorAsk(taken.key, stack.name(self._rank), over, lambda: not taken.ended, until, first, later)

    def _ask_for_never(self, taken: _TakenParts) -> TensorAsk:
        def over(_: torch.Tensor | None, error: KVGrpcError | None) -> None:
            """Runs in the thread of TensorAsker."""
            taken.gone = error
            self._change(taken)

        more: dict[str, Any] = {"source": taken.source}
        return TensorAsk(taken.key, NEVER, over, lambda: not taken.ended, math.inf, more, more)

    def _change(self, taken: _TakenParts) -> None:
        self._changed.append(taken)
        self._news.set()

    def load(self, load: LoadTask) -> None:
        """Copies what was taken into the blocks of a load. Raises the error of a tensor that did not come, or NotFound
        (TRANSFER_NOT_FOUND) for a block that was not taken or is not here: then no block is filled.
        """
        whole = list(self._found(load))
        if missing := len(load.blocks) - sum(len(blocks) for blocks, _, _ in whole):
            raise NotFound(Reason.TRANSFER_NOT_FOUND, f"nothing was taken for {missing} of its blocks")
        for blocks, coming, skip in whole:
            for stack, tensor in zip(self._stacks, coming.tensors, strict=True):
                assert tensor is not None, "its part is here"
                stack.scatter(self._caches, blocks, tensor[:, skip : skip + len(blocks)])

    def _found(self, load: LoadTask) -> Iterator[tuple[list[int], _AwaitedPart, int]]:
        """Yields for each part of a load: the blocks to fill, what came, and the part's first block to copy."""
        taken = self._taken.get(self._key_of.get(load.request_id, b""))
        if taken is None:
            raise NotFound(Reason.TRANSFER_NOT_FOUND, "nothing was taken for it")
        end = load.first_block + len(load.blocks)
        for part in taken.requests[load.request_id].parts:
            first, last = max(part.first_block, load.first_block), min(part.first_block + part.blocks, end)
            if first >= last:
                continue
            coming = taken.parts[part]
            if coming.error is not None:
                raise coming.error
            if coming.lacks:
                raise NotFound(Reason.TRANSFER_NOT_FOUND, f"part {part.number} is not here as a whole")
            yield load.blocks[first - load.first_block : last - load.first_block], coming, first - part.first_block

    def left(self, request_id: str) -> None:
        """Notes that a request takes nothing any more."""
        key = self._key_of.pop(request_id, None)
        if key is not None and key in self._taken:
            self._taken[key].requests.pop(request_id, None)

    def ended(self, key: bytes) -> None:
        """Notes that nothing is taken under this key any more."""
        taken = self._taken.pop(key, None)
        if taken is not None:
            taken.ended = True

    def wait(self) -> None:
        """Returns when there is news, or after `IDLE_S`."""
        self._news.wait(IDLE_S)

    def hear(self, heard: WorkerNews) -> None:
        """Reports, for keys that changed, what is here and what will not come."""
        self._asker.turn()
        self._watcher.turn()
        self._news.clear()
        changed: dict[_TakenParts, None] = {}
        while self._changed:
            changed[self._changed.popleft()] = None
        for taken in changed:
            for request_id, request in taken.requests.items():
                self._look(taken, request_id, request, heard)

    def _look(self, taken: _TakenParts, request_id: str, request: _TakingRequest, heard: WorkerNews) -> None:
        coming = [taken.parts[part] for part in request.parts]
        error = next((part.error for part in coming if part.error is not None), None)
        if error is None and not any(part.lacks for part in coming):
            if request.told != len(coming):
                request.told = len(coming)
                heard.held[request_id, taken.key, len(coming)] += 1
        elif error := error or taken.gone:
            heard.lost[request_id, taken.key] = loss_of(error)

    def close(self) -> None:
        """Ends all calls; nothing is taken any more."""
        self._asker.close()
        self._watcher.close()
