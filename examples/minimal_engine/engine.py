"""The demo's engine on kvgrpc: all that an engine adds to serve as prefill or decode side, or both.

`MinimalEngine` is a scheduler and a worker in one process. Its paged pool is shared memory that the lead made, and its
own BlockManager gives out the blocks (an ENGINE_MANAGED pool). It keeps one reference per hand-over of a block, and
drops the reference on BlocksReturned.

In this file blocks move by pull. Other files add what only some engines do: `push`, `chat` for conversations that come
back, `ranks` for a pool that is split over several, and `windows` for layers that see the last tokens only.
"""

import time
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from examples.minimal_engine.model import MinimalModel, ModelConfig, encode, greedy_token
from examples.minimal_engine.ranks import layers_in
from examples.minimal_engine.windows import GroupBlocks, split
from kvgrpc.core.values.layout import Group, GroupKind, uniform_layout
from kvgrpc.engine import BlocksReturned, Engine, Failed, HandOver, LayersReceived, Pull, Rank, Received, content
from kvgrpc.engine.transfers.handles import Handle


class TransferFailed(Exception):
    """Raised when the KV did not come; nothing of it was used."""


@dataclass
class Request:
    """One request of a user. It holds one reference on each block of its table."""

    ids: list[int]
    table: list[int]
    have_tokens: int
    """Number of tokens whose KV is in the table."""


class MinimalEngine:
    """A model, a paged pool, and (with a session socket) a lead."""

    def __init__(
        self, socket_path: str = "", blocks: int = 256, block_tokens: int = 16, ranks: int = 1, window_tokens: int = 0
    ) -> None:
        """Splits the KV heads over `ranks` ranks, which divide their number. `window_tokens` is as in ModelConfig. The
        socket path "launch" starts a lead of the engine's own.
        """
        config = ModelConfig(window_tokens=window_tokens)
        self.model = MinimalModel(config)
        shape = config.kv_heads // ranks, config.head_dim, "float32"
        group = Group("full", GroupKind.FULL_ATTENTION, config.layers, block_tokens, blocks, *shape)
        layout = split(uniform_layout(group, config.block_bytes(block_tokens) // ranks), window_tokens)
        self.blocks = GroupBlocks(blocks, block_tokens, layout.groups)
        memories = [np.zeros(layout.total_bytes, dtype=np.uint8) for _ in range(ranks)]
        if socket_path:
            own: Any = {"pool": layout, "world_size": ranks, "weights_revision": self.model.weights_revision}
            self.engine = Engine.launch(**own) if socket_path == "launch" else Engine.attach(socket_path, **own)
            self.ranks = [Rank(self.engine.ticket, rank) for rank in range(ranks)]
            memories = [rank.memory for rank in self.ranks]
        self.kv = layers_in(memories, config, blocks, block_tokens)
        self.given: dict[Handle, list[int]] = {}
        """References that belong to a hand-over, until its blocks are returned."""
        self.layers_here: WeakKeyDictionary[Handle, tuple[tuple[int, int], ...]] = WeakKeyDictionary()
        """Ranges (first, count) of the complete layers of pushes in flight."""
        self.prefilled_s = self.received_s = 0.0
        """Time of the last complete prefill, and of the last transfer here, on this host's CLOCK_MONOTONIC."""
        self._why: WeakKeyDictionary[Handle, str] = WeakKeyDictionary()
        """Errors of failed transfers."""

    def begin(self, prompt: str) -> Request:
        """Returns a request with blocks for a prompt, which include the cached prefix."""
        ids = encode(prompt)
        return Request(ids, *self.blocks.allocate(ids))

    def prefill(self, request: Request, **labels: Any) -> HandOver:
        """Computes the KV that is missing, and hands the prompt over."""
        self.model.forward(request.ids[request.have_tokens :], request.have_tokens, request.table, self.kv)
        self.prefilled_s = time.clock_gettime(time.CLOCK_MONOTONIC)
        self.blocks.register(request.table, request.ids)
        return self.hand_over(request, **labels)

    def hand_over(self, request: Request, **labels: Any) -> HandOver:
        """Hands the KV of all tokens of a request over. Its references now belong to the hand-over."""
        blocks = self.blocks.cut(request.table, len(request.ids))
        handover = self.engine.finished_blocks(blocks, content(request.ids), **labels)
        self.engine.flush()
        self.given[handover] = request.table
        return handover

    def receive(self, request: Request, grant: bytes, **labels: Any) -> Pull:
        """Pulls a prompt's KV, beyond what is here. Raises TransferFailed."""
        pull = self.engine.pull(grant, content(request.ids), **labels)
        self.fill(request, pull)
        return pull

    def fill(self, request: Request, pull: Pull) -> None:
        """Gives a pull the request's blocks and waits. Raises TransferFailed; the request then owns its blocks
        again.
        """
        missing = self.blocks.cut(request.table, pull.use_tokens, request.have_tokens)
        pull.start(missing, have_tokens=request.have_tokens)
        self.wait(pull)
        self.blocks.filled(request.table, pull.use_tokens, request.have_tokens)
        request.have_tokens = max(request.have_tokens, pull.use_tokens)

    def decode(self, request: Request, count: int, logits: torch.Tensor | None = None) -> list[int]:
        """Returns greedy tokens after the prompt, whose KV is there. `logits` are those of its end, if known.

        The tokens join the request; all but the last then have their KV.
        """
        ids, prompt_tokens = request.ids, len(request.ids)
        start = min(request.have_tokens, prompt_tokens - 1)
        for _ in range(count):
            if logits is None:
                self.blocks.extend(request.table, len(ids))
                logits = self.model.forward(ids[start:], start, request.table, self.kv)
            ids.append(greedy_token(logits))
            start, logits = len(ids) - 1, None
        request.have_tokens = len(ids) - 1
        self.blocks.register(request.table, ids[:-1])
        return ids[prompt_tokens:]

    def release(self, request: Request) -> None:
        """Ends the request. Its KV stays findable until its blocks are recycled."""
        self.blocks.release(request.table)

    def step(self, timeout_s: float = 0.0) -> None:
        """Takes in what happened; every engine step does this once."""
        for event in self.engine.poll(timeout_s):
            match event:
                case BlocksReturned(given) if given in self.given:
                    self.blocks.release(self.given.pop(given))
                case LayersReceived(reservation, layers):
                    self.layers_here[reservation] = layers
                case Received():
                    self.received_s = time.clock_gettime(time.CLOCK_MONOTONIC)
                case Failed(transfer, reason, message):
                    self._why[transfer] = f"{reason}: {message}"

    def wait(self, transfer: Handle) -> None:
        """Waits until a transfer to this engine is over. Raises TransferFailed."""
        while not transfer.over:
            self.step(timeout_s=1.0)
        if transfer.failed:
            raise TransferFailed(self._why[transfer])
