"""The engine on transformers' continuous batching as the conformance kit plays with it. Its steps are over at once."""

import os
from collections.abc import Sequence
from typing import Any, Self

import torch

from examples.transformers.model import make_model
from examples.transformers.paged import Loading, PagedEngine
from kvgrpc.engine import Engine, HandOver
from kvgrpc.testing import BlockMemory

BLOCKS = 32


class PagedAdapter:
    """An EngineAdapter."""

    def __init__(self) -> None:
        self.paged = PagedEngine(make_model(), BLOCKS, "kit")
        memory: torch.Tensor = self.paged.cache.cache_tensor
        self._memory = BlockMemory(self.engine.pool, [[memory.numpy()]])
        self._prompts: dict[str, list[int]] = {}
        self._given: dict[str, HandOver] = {}
        self._taking: dict[str, Loading] = {}
        self._blocks: dict[str, list[int]] = {}

    @property
    def engine(self) -> Engine:
        return self.paged.engine

    def give(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._forget(request_id)
        self._prompts[request_id] = list(token_ids)
        self.paged.prefill(request_id, token_ids)

    def given(self, request_id: str) -> dict[str, Any] | None:
        found = self._given.get(request_id)
        return found.kv_transfer_params if found is not None else None

    def take(self, request_id: str, token_ids: Sequence[int], kv_transfer_params: dict[str, Any]) -> None:
        self._forget(request_id)
        self._taking[request_id] = self.paged.take(request_id, token_ids, 1, kv_transfer_params)

    def _forget(self, request_id: str) -> None:
        """Forgets an earlier request with this id."""
        for known in (self._given, self._taking, self._blocks, self.paged.answers):
            known.pop(request_id, None)

    def taken(self, request_id: str) -> int | None:
        request = self._taking[request_id]
        if request.pull in self.paged.loading:
            return None
        return 0 if request.pull.failed else request.pull.use_tokens

    def schedule(self) -> None:
        self.paged.step()
        for request_id, ids in list(self._prompts.items()):
            if request_id in self.paged.answers:
                del self._prompts[request_id]
                self._given[request_id] = handover = self.paged.hand_over(ids, os.urandom(16))
                self._blocks[request_id] = list(self.paged.blocks.block_table[self.paged.given[handover]])
        for request_id, request in self._taking.items():
            if table := self.paged.blocks.block_table.get(request.holder):
                self._blocks[request_id] = list(table)

    def compute(self) -> None:
        pass

    def abort(self, request_id: str) -> None:
        self._prompts.pop(request_id, None)
        if request_id in self._given:
            self._given[request_id].cancel()
        elif request_id in self._taking:
            self.paged.abort(self._taking[request_id])
        self.paged.manager.cancel_request(request_id)

    def preempt(self, request_id: str) -> None:
        handover = self._given[request_id]
        if handover.take_back():
            self.paged.free(handover)

    def blocks(self, request_id: str) -> list[list[int]]:
        return [self._blocks.get(request_id, [])]

    def free_blocks(self) -> list[list[int]]:
        blocks, pool = self.paged.blocks, self.paged.cache.pool
        per = blocks.blocks_per_sector
        free = [sector * per + i for sector in pool.free_sectors for i in range(per)]
        free += [block for tree in pool._free_blocks[blocks.index].trees.values() for block in tree]
        return [free + list(blocks.ledger.cached_blocks)]

    def read(self, group: int, block: int) -> bytes:
        return self._memory.read(group, block)

    def fill(self, group: int, block: int, byte: int) -> None:
        self._memory.fill(group, block, byte)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.paged.close()
