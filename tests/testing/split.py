"""The minimal engine with two ranks, each of which ends its steps by itself."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from examples.minimal_engine.ranks import layers_in
from tests.testing.minimal import BLOCKS, MinimalAdapter, Step


class SplitAdapter(MinimalAdapter):
    """An EngineAdapter. The model computes all heads at once, beside the pool; then each rank takes its own."""

    RANKS = 2

    def __init__(self, socket_path: str = "launch") -> None:
        super().__init__(socket_path)
        self._computed: list[NDArray[np.uint8]] = []
        """Memory of all ranks with the batch; empty: no rank has begun with it."""
        self._behind: set[int] = set()
        """Ranks that have not ended the batch."""

    def compute(self) -> None:
        for rank in range(self.RANKS):
            self.compute_rank(rank)

    def compute_rank(self, rank: int) -> None:
        if self.batch and not self._behind:
            self._compute()
        if rank not in self._behind:
            return
        tables = [step.served.request.table for step in self.batch if step.served.request is not None]
        for block in [block for table in tables for block in table]:
            self._rows(self.minimal.ranks[rank].memory)[:, block] = self._rows(self._computed[rank])[:, block]
        self.report(rank, self.batch)
        self._behind.discard(rank)
        if not self._behind:
            for step in self.batch.copy():
                self.finish(step)

    def report(self, rank: int, batch: Sequence[Step]) -> None:
        """Reports the steps of the batch, which this rank has ended."""
        self.minimal.ranks[rank].step_done(batch[-1].number)

    def _compute(self) -> None:
        """Computes the batch beside the pool."""
        self._computed = [rank.memory.copy() for rank in self.minimal.ranks]
        self._behind = set(range(self.RANKS))
        model = self.minimal.model
        kv = layers_in(self._computed, model.config, BLOCKS, self.minimal.blocks.block_tokens)
        for step in self.batch:
            request = step.served.request
            assert request is not None
            model.forward(request.ids[step.start : step.end], step.start, request.table, kv)

    def _rows(self, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Returns a rank's memory by layer and block."""
        return memory.reshape(len(self.minimal.kv), BLOCKS, -1)
