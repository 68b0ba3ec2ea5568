"""The minimal engine as the conformance kit plays with it: its requests side by side, and steps that may be late.

Each method is what an author writes. `broken.py` overrides one of them at a time. A push goes in two steps: the first
block in a part of all layers, and the rest in a part for each layer.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from examples.minimal_engine.engine import MinimalEngine, Request
from examples.minimal_engine.model import ForwardPass
from examples.minimal_engine.paged import OutOfBlocks
from kvgrpc.core.values.grants import from_json
from kvgrpc.engine import Engine, HandOver, Pull, Push, Reservation, content
from kvgrpc.testing import BlockMemory

BLOCKS = 24


@dataclass(eq=False)
class Served:
    """A request of the kit."""

    id: str
    ids: list[int]
    params: dict[str, Any] = field(default_factory=dict)
    """What it takes; or, once it is handed over, what it gives."""
    key: bytes = b""
    """Transfer key, if it is pushed."""
    source: str = ""
    """Address of the lead that pushes to it."""
    request: Request | None = None
    pull: Pull | Reservation | None = None
    handover: HandOver | None = None
    push: Push | None = None
    taken: int | None = None
    left: bool = False


@dataclass(eq=False)
class Step:
    """What a step computes of a request: the KV of tokens [start, end)."""

    number: int
    served: Served
    start: int
    end: int
    run: ForwardPass | None = None


class MinimalAdapter:
    """An EngineAdapter."""

    RANKS = 1

    def __init__(self, socket_path: str = "launch") -> None:
        self.minimal = MinimalEngine(socket_path, blocks=BLOCKS, ranks=self.RANKS)
        self.requests: dict[str, Served] = {}
        self.arrived: list[Served] = []
        self.loading: list[Served] = []
        self.pushing: list[Served] = []
        self.batch: list[Step] = []
        self.number = 0
        self._memory = BlockMemory(self.engine.pool, [[rank.memory] for rank in self.minimal.ranks])

    @property
    def engine(self) -> Engine:
        return self.minimal.engine

    def give(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._arrive(Served(request_id, list(token_ids)))

    def given(self, request_id: str) -> dict[str, Any] | None:
        return self.requests[request_id].params or None

    def take(self, request_id: str, token_ids: Sequence[int], kv_transfer_params: dict[str, Any]) -> None:
        served = Served(request_id, list(token_ids), kv_transfer_params)
        served.pull = self.engine.pull(from_json(kv_transfer_params), content(token_ids))
        self._arrive(served)

    def push(self, request_id: str, token_ids: Sequence[int], transfer_key: bytes) -> None:
        served = Served(request_id, list(token_ids), key=transfer_key)
        served.push = self.engine.push(content(token_ids), transfer_key=transfer_key)
        self._arrive(served)

    def reserve(self, request_id: str, token_ids: Sequence[int], transfer_key: bytes, source_address: str) -> None:
        self._arrive(Served(request_id, list(token_ids), key=transfer_key, source=source_address))

    def taken(self, request_id: str) -> int | None:
        return self.requests[request_id].taken

    def schedule(self) -> None:
        self.minimal.step()
        for served in [it for it in self.loading if it.pull is not None and it.pull.over]:
            self.loading.remove(served)
            self.loaded(served)
        for served in self.arrived.copy():
            try:
                served.request = Request(served.ids, *self.minimal.blocks.allocate(served.ids))
            except OutOfBlocks:
                break
            self.arrived.remove(served)
            if served.push is not None:
                self.pushing.append(served)
            elif served.source:
                self.reserve_blocks(served)
            elif isinstance(served.pull, Pull):
                self.start(served, served.pull)
            else:
                self.hand_over(served)
        for served in self.pushing.copy():
            self.push_next(served)

    def compute(self) -> None:
        while self.batch:
            self.compute_layer()

    def compute_layer(self) -> None:
        if not self.batch:
            return
        step, model = self.batch[0], self.minimal.model
        request = step.served.request
        assert request is not None
        step.run = step.run or model.begin(
            request.ids[step.start : step.end], step.start, request.table, self.minimal.kv
        )
        model.next_layer(step.run)
        if step.run.layers_done < len(model.layers):
            self.layer_done(step, step.run.layers_done - 1)
        else:
            self.finish(step)
            for rank in self.minimal.ranks:
                rank.step_done(step.number)

    def finish(self, step: Step) -> None:
        """Ends a step: its KV is findable from now on."""
        self.batch.remove(step)
        request = step.served.request
        assert request is not None
        if not step.served.left:
            self.minimal.blocks.register(request.table, request.ids[: step.end])

    def layer_done(self, step: Step, layer: int) -> None:
        """Reports one layer of a step."""
        for rank in self.minimal.ranks:
            rank.layers_done(step.number, layer, 1)

    def abort(self, request_id: str) -> None:
        served = self.requests[request_id]
        served.left = True
        if served.handover is not None:
            served.handover.cancel()
        if served.pull is not None:
            self.let_go(served.pull)
        if served.push is not None and not served.push.over:
            self.give_up(served.push)
        if served in self.pushing:
            self.pushing.remove(served)
        if served.request is None:
            self.arrived.remove(served)
        elif served.pull is not None and served not in self.loading:
            self.minimal.release(served.request)

    def preempt(self, request_id: str) -> None:
        handover = self.requests[request_id].handover
        assert handover is not None
        if self.take_back(handover):
            self.minimal.blocks.release(self.minimal.given.pop(handover))

    def blocks(self, request_id: str) -> list[list[int]]:
        request = self.requests[request_id].request
        return [list(request.table) if request is not None else []]

    def free_blocks(self) -> list[list[int]]:
        return [list(self.minimal.blocks._free)]

    def read(self, group: int, block: int) -> bytes:
        return self._memory.read(group, block)

    def fill(self, group: int, block: int, byte: int) -> None:
        self._memory.fill(group, block, byte)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        for rank in self.minimal.ranks:
            rank.close()

    # -- steps of a request

    def _arrive(self, served: Served) -> None:
        assert served.id not in self.requests or self.requests[served.id].left, "an id comes again once it was aborted"
        self.requests[served.id] = served
        self.arrived.append(served)

    def begin(self, served: Served, start: int, end: int) -> None:
        """Begins a step."""
        self.number += 1
        self.batch.append(Step(self.number, served, start, end))

    def hand_over(self, served: Served) -> None:
        """Hands over what the next step computes."""
        assert served.request is not None
        self.begin(served, served.request.have_tokens, len(served.ids))
        served.handover = self.minimal.hand_over(
            served.request, transfer_key=os.urandom(16), after_step=self.step_of(self.number)
        )
        served.params = served.handover.kv_transfer_params

    def push_next(self, served: Served) -> None:
        """Pushes what the next step computes."""
        request, push, blocks = served.request, served.push, self.minimal.blocks
        assert request is not None
        assert push is not None
        self.minimal.given[push] = request.table
        last, pushed = len(self.minimal.kv) - 1, push.lease_id != ""
        end = len(served.ids) if pushed else blocks.block_tokens
        start = max(request.have_tokens, blocks.block_tokens if pushed else 0)
        if start < end:
            self.begin(served, start, end)
        after_step = self.step_of(self.number)
        if not pushed:
            push.finished(request.table[:1], after_step=after_step)
            return
        self.pushing.remove(served)
        for layer in range(last + 1):
            push.finished(request.table[1:], layers=(layer, 1), last=layer == last, after_step=after_step)

    def reserve_blocks(self, served: Served) -> None:
        """Gives blocks to a push, once the steps in flight are over."""
        request = served.request
        assert request is not None
        missing = self.minimal.blocks.cut(request.table, len(served.ids), request.have_tokens)
        served.pull = self.engine.reserve(
            missing, content(served.ids), transfer_key=served.key, have_tokens=request.have_tokens,
            source_address=served.source, after_step=self.step_of(self.number),
        )  # fmt: skip
        self.loading.append(served)

    def start(self, served: Served, pull: Pull) -> None:
        """Gives blocks to a pull, once the steps in flight are over."""
        request = served.request
        assert request is not None
        missing = self.minimal.blocks.cut(request.table, pull.use_tokens, request.have_tokens)
        pull.start(missing, have_tokens=request.have_tokens, after_step=self.step_of(self.number))
        self.loading.append(served)

    def loaded(self, served: Served) -> None:
        """Goes on with a request whose transfer is over: its blocks are its own again."""
        request, pull = served.request, served.pull
        assert request is not None
        assert pull is not None
        if served.left:
            self.minimal.release(request)
        elif pull.failed:
            served.taken = 0
            self.begin(served, request.have_tokens, len(served.ids))
        else:
            request.have_tokens = max(request.have_tokens, pull.use_tokens)
            self.minimal.blocks.register(request.table, request.ids)
            served.taken = pull.use_tokens

    def let_go(self, pull: Pull | Reservation) -> None:
        pull.cancel("its client hung up")

    def give_up(self, push: Push) -> None:
        push.fail("its client hung up")

    def take_back(self, handover: HandOver) -> bool:
        return handover.take_back()

    def step_of(self, number: int) -> int:
        """Returns the step that a call names."""
        return number
