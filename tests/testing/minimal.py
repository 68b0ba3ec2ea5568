"""The minimal engine as the conformance kit plays with it: its requests side by side, and steps that may be late.

Each method is what an author writes. `broken.py` overrides one of them at a time.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from examples.minimal_engine.engine import MinimalEngine, Request
from examples.minimal_engine.paged import OutOfBlocks
from kvgrpc.core.values.grants import from_json
from kvgrpc.engine import Engine, HandOver, Pull, content
from kvgrpc.testing import BlockMemory

BLOCKS = 24


@dataclass(eq=False)
class Served:
    """A request of the kit."""

    id: str
    ids: list[int]
    params: dict[str, Any] = field(default_factory=dict)
    """What it takes; or, once it is handed over, what it gives."""
    request: Request | None = None
    pull: Pull | None = None
    handover: HandOver | None = None
    taken: int | None = None
    left: bool = False


class MinimalAdapter:
    """An EngineAdapter."""

    def __init__(self, socket_path: str = "launch") -> None:
        self.minimal = MinimalEngine(socket_path, blocks=BLOCKS)
        self.requests: dict[str, Served] = {}
        self.arrived: list[Served] = []
        self.loading: list[Served] = []
        self.batch: list[Served] = []
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
            if served.pull is None:
                self.hand_over(served)
            else:
                self.start(served, served.pull)

    def compute(self) -> None:
        for served in self.batch:
            request = served.request
            assert request is not None
            missing = request.ids[request.have_tokens :]
            self.minimal.model.forward(missing, request.have_tokens, request.table, self.minimal.kv)
            if not served.left:
                self.minimal.blocks.register(request.table, request.ids)
        self.batch.clear()
        self.minimal.ranks[0].step_done(self.number)

    def abort(self, request_id: str) -> None:
        served = self.requests[request_id]
        served.left = True
        if served.handover is not None:
            served.handover.cancel()
        if served.pull is not None:
            self.let_go(served.pull)
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
        self.requests[served.id] = served
        self.arrived.append(served)

    def hand_over(self, served: Served) -> None:
        """Hands over what the next step computes."""
        self.number += 1
        self.batch.append(served)
        assert served.request is not None
        served.handover = self.minimal.hand_over(
            served.request, transfer_key=os.urandom(16), after_step=self.step_of(self.number)
        )
        served.params = served.handover.kv_transfer_params

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
            self.number += 1
            self.batch.append(served)
        else:
            request.have_tokens = max(request.have_tokens, pull.use_tokens)
            self.minimal.blocks.register(request.table, request.ids)
            served.taken = pull.use_tokens

    def let_go(self, pull: Pull) -> None:
        pull.cancel("its client hung up")

    def take_back(self, handover: HandOver) -> bool:
        return handover.take_back()

    def step_of(self, number: int) -> int:
        """Returns the step that a call names."""
        return number
