"""The demo's engine on kvgrpc: all that an engine adds to serve as prefill or decode side, or both.

`MinimalEngine` is a scheduler and a worker in one process. Its paged pool is shared memory that the lead made; its own
BlockManager gives out the blocks (an ENGINE_MANAGED pool). It keeps one reference per hand-over of a block, and gives
it back when BlocksReturned says so.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from examples.minimal_engine.model import MinimalModel, encode, greedy_token
from examples.minimal_engine.paged import BlockManager
from kvgrpc.core.layout import Group, GroupKind, uniform_layout
from kvgrpc.engine import BlocksReturned, Engine, Failed, HandOver, Pull, Rank, Received, content


class PullFailed(Exception):
    """The KV did not come; nothing of it was used."""


class MinimalEngine:
    """A model, a paged pool, and (with a session socket) a lead."""

    def __init__(self, socket_path: str = "", blocks: int = 256, block_tokens: int = 16) -> None:
        self.model = MinimalModel()
        config = self.model.config
        self.blocks = BlockManager(blocks, block_tokens)
        group = Group(
            "full", GroupKind.FULL_ATTENTION, config.layers, block_tokens, blocks, config.kv_heads, config.head_dim,
            "float32",
        )  # fmt: skip
        layout = uniform_layout(group, config.block_bytes(block_tokens))
        memory = np.zeros(layout.total_bytes, dtype=np.uint8)
        if socket_path:
            self.engine = Engine.attach(socket_path, pool=layout, weights_revision=self.model.weights_revision)
            self.rank = Rank(self.engine.ticket)
            memory = self.rank.memory
        layers = memory.view(np.float32).reshape(config.layers, *config.kv_shape(blocks, block_tokens))
        self.kv = [torch.from_numpy(layer) for layer in layers]
        self._held: dict[HandOver, list[int]] = {}
        self._ends: dict[Pull, Received | Failed] = {}

    def prefill(self, prompt: str, **request: Any) -> HandOver:
        """Computes a prompt's KV and hands it over; the hand-over keeps the request's references."""
        ids = encode(prompt)
        table, cached = self.blocks.allocate(ids)
        self.model.forward(ids[cached:], cached, table, self.kv)
        self.blocks.register(table, ids)
        handover = self.engine.finished_blocks(table, content(ids), **request)
        self.engine.flush()
        self._held[handover] = table
        return handover

    def receive(self, prompt: str, grant: bytes, **request: Any) -> tuple[Pull, list[int]]:
        """Pulls a prompt's KV into blocks of this engine, beyond the prefix that it holds. Raises PullFailed."""
        ids = encode(prompt)
        table, cached = self.blocks.allocate(ids)
        pull = self.engine.pull(grant, content(ids), **request)
        block = self.blocks.block_tokens
        pull.start(table[cached // block : -(-pull.use_tokens // block)], have_tokens=cached)
        while not pull.over:
            self.step(timeout_s=1.0)
        end = self._ends.pop(pull)
        if isinstance(end, Failed):
            self.blocks.release(table)
            raise PullFailed(f"{end.reason}: {end.message}")
        return pull, table

    def decode(self, prompt: str, table: list[int], have_tokens: int, count: int) -> list[int]:
        """Greedy tokens from the KV of `have_tokens` tokens in `table`, which is released at the end."""
        ids, made = encode(prompt), list[int]()
        start = min(have_tokens, len(ids) - 1)
        for _ in range(count):
            self.blocks.extend(table, len(ids))
            logits = self.model.forward(ids[start:], start, table, self.kv)
            made.append(greedy_token(logits))
            start = len(ids)
            ids.append(made[-1])
        self.blocks.register(table, ids[:-1])
        self.blocks.release(table)
        return made

    def generate(self, prompt: str, count: int) -> list[int]:
        """Prefill and decode in one engine: what the transferred KV must reproduce."""
        ids = encode(prompt)
        table, cached = self.blocks.allocate(ids)
        return self.decode(prompt, table, cached, count)

    def step(self, timeout_s: float = 0.0) -> None:
        """Takes in what happened; every engine step does this once."""
        for event in self.engine.poll(timeout_s):
            match event:
                case BlocksReturned(HandOver() as handover):
                    self.blocks.release(self._held.pop(handover))
                case Received(Pull() as pull) | Failed(Pull() as pull):
                    self._ends[pull] = event
                case _:
                    pass

    def corrupt(self, table: Sequence[int]) -> None:
        """Changes KV of the last block, which was received in any case, to show that a comparison would notice."""
        self.kv[0][table[-1]].mul_(-1.0)
